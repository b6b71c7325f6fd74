"""The verb `bench`: how fast the engine is in this process, without HTTP. Knows no server and no other engine."""

from __future__ import annotations

QUESTIONS = (
    "Tell me a long story about a fox who learns to read.",
    "Explain step by step how bread is made from grain.",
    "Write a long letter from a sailor to his family.",
    "Describe a day in the life of a city gardener in detail.",
    "Explain how rain forms, as you would to a curious child.",
    "Write a detailed report about a long walk through old mountains.",
    "Tell the history of a small village from its founding to today.",
    "Describe, room by room, a house in which you would like to live.",
)
