"""First messages of chats: held-out questions, and tasks over texts that every Python installation carries.

Knows text only, no tokens and no model.
"""

from __future__ import annotations

import pkgutil
import random
import re
import sys
from pathlib import Path

SYSTEMS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "You are a helpful AI assistant. Answer in short.",
)

# Never trained on: what acceptance is measured with.
HELD_OUT = (
    "What is the capital of France, and what is it known for?",
    "Explain photosynthesis to a child.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do I boil an egg so that the yolk stays soft?",
    "Give me five tips for a job interview.",
    "What is the difference between a list and a tuple in Python?",
    "Write a Python function that reverses a string.",
    "Who wrote Pride and Prejudice? Tell me about the author.",
    "Why is the sky blue?",
    "Plan a weekend in Lisbon for two people.",
    "Summarize the causes of the First World War.",
    "Write an email that asks my landlord to repair the heating.",
    "What are the benefits of regular exercise?",
    "Explain what an API is in simple words.",
    "Write a poem about autumn.",
    "How does a bicycle stay upright?",
    "What should I pack for a hike in the mountains?",
    "Explain the water cycle step by step.",
    "Describe the taste of chocolate without using the word sweet.",
    "What is machine learning?",
    "How can I save money each month?",
    "Write a SQL query that counts the orders of each customer.",
    "What is the Pythagorean theorem? Give an example.",
    "Tell me a joke about computers.",
    "What are the planets of the solar system?",
    "How do vaccines work?",
    "Write a product description for a wooden chair.",
    "What is inflation, and why does it matter?",
    "Give me a recipe for pancakes.",
    "Explain recursion with an example in code.",
    "What is the meaning of the word serendipity?",
    "How do I learn to play the guitar?",
    "What causes earthquakes?",
    "Write a dialogue between a teacher and a student about homework.",
    "List three advantages and three disadvantages of remote work.",
    "How do I remove a stain of red wine?",
    "Who was Marie Curie?",
    "What is a black hole?",
    "Write a haiku about the sea and explain it.",
    "How should I prepare for a marathon?",
    "Translate 'good morning' into Spanish, French and German.",
    "What is the best way to learn a new language?",
    "Explain supply and demand.",
    "Write a letter of thanks to a colleague who is leaving.",
    "How does a refrigerator work?",
    "What are prime numbers? List the first ten.",
    "Suggest a name for a cafe near a river, and say why.",
    "Describe how to change a flat tyre.",
)

_TASKS = (
    "Summarize this text:\n\n{}",
    "Explain the following to a beginner:\n\n{}",
    "Rewrite this text so that it is easier to read:\n\n{}",
    "What are the main points of this text?\n\n{}",
    "{}\n\nWrite three questions about this text and answer them.",
    "Write a short introduction to the topic of this text:\n\n{}",
    "{}\n\nWhat does this code do?",
    "Continue this text:\n\n{}",
)


def passages(folder: Path) -> list[str]:
    """Paragraphs of the documents under `folder`, and of the modules of the standard library."""
    texts = [path.read_text("utf-8") for path in sorted(folder.rglob("*.md"))]
    library = Path(pkgutil.__file__)
    for path in sorted(library.parent.glob("*.py")):
        source = path.read_text("utf-8", errors="ignore")
        texts += re.findall(r'"""(.{200,}?)"""', source, flags=re.DOTALL)
        texts += re.findall(r"(?:^|\n)(def .{150,900}?)\n(?=\S)", source, flags=re.DOTALL)
    parts = [part.strip() for text in texts for part in text.split("\n\n")]
    return [part[:1200] for part in parts if len(part) > 150]


def tasks(folder: Path, count: int, seed: int) -> list[str]:
    """`count` first messages over those passages. Raises SystemExit if there is no text."""
    dice, found = random.Random(seed), passages(folder)
    if not found:
        sys.exit(f"{folder} holds no text to make prompts of.")
    return [dice.choice(_TASKS).format(dice.choice(found)) for _ in range(count)]
