"""The conversations that both sides are asked. Knows neither side."""

from __future__ import annotations

NUM_TOKENS = 12
# Stock MLX runs the starter at some 10 tokens a second on a CPU, so prompts are short: a system message of their own
# keeps the template from adding its longer one. The first shows that one.
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "default": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet?"},
    ],
    "unicode": [
        {"role": "system", "content": "é"},
        {"role": "user", "content": "Was heißt 日本 😀 \n\t x²?"},
    ],
    "turns": [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "To three!"},
        {"role": "assistant", "content": "One, two, three."},
        {"role": "user", "content": "Now backwards."},
    ],
}
KV8 = "system"  # the one that is also run with quantised keys and values
