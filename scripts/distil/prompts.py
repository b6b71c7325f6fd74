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

_QUESTIONS = Path(__file__).resolve().parents[2] / "tests" / "bench" / "texts" / "questions.txt"

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


def held_out() -> list[str]:
    """Never trained on: what acceptance and speed are measured with."""
    return _QUESTIONS.read_text("utf-8").splitlines()


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
