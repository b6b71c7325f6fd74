"""An agent's conversation of 20 turns: tools, instructions, and what each turn adds. Knows no server.

The starter model's own template has no place for tools and its context ends at 8192 tokens, so the conversation runs on
a folder with the same weights and tokenizer, a template that writes tools as JSON, and room for 16384 tokens. What the
model says there is of no interest; how many tokens are computed is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.load import long_text

CONTEXT = 16_384
NUM_TURNS = 20
ANSWER_TOKENS = 40

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools, as JSON:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT, _NUMBER, _YES_OR_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def _tool(name: str, description: str, required: Sequence[str], **fields: tuple[Any, str]) -> dict[str, Any]:
    properties = {field: {**kind, "description": text} for field, (kind, text) in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": [*required]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = (
    _tool(
        "read_file",
        "Returns the text of a file of the project, with line numbers. Long files are returned in parts; ask for the "
        "next part with `offset`. Fails if the file does not exist or holds no text.",
        ["path"],
        path=(_TEXT, "Where the file is, from the root of the project."),
        offset=(_NUMBER, "The first line to return, from 1; the first line by default."),
        limit=(_NUMBER, "How many lines to return at most; 2000 by default."),
    ),
    _tool(
        "write_file",
        "Writes a whole file and makes the folders that it needs. What was there is replaced, so read it before. "
        "Prefer `edit_file` for small changes, which shows what has changed.",
        ["path", "content"],
        path=(_TEXT, "Where the file goes, from the root of the project."),
        content=(_TEXT, "The whole text, with a newline at its end."),
    ),
    _tool(
        "edit_file",
        "Replaces a passage of a file by another one. The passage must occur exactly once, with its indentation; give "
        "more lines around it if it does not. Nothing is written if it cannot be found.",
        ["path", "old", "new"],
        path=(_TEXT, "The file, from the root of the project."),
        old=(_TEXT, "The passage as it is now."),
        new=(_TEXT, "The passage as it shall be."),
        everywhere=(_YES_OR_NO, "Replace every occurrence instead of the only one."),
    ),
    _tool(
        "search",
        "Finds lines by a regular expression in all files of the project that version control does not ignore. Returns "
        "the path, the number and the text of each line, the most recently changed files first.",
        ["pattern"],
        pattern=(_TEXT, "The regular expression, in the syntax of Rust's regex crate."),
        folder=(_TEXT, "Search below this folder only."),
        files=(_TEXT, "Search files whose names match this glob only, such as *.py."),
        context=(_NUMBER, "Lines to show before and after each line that was found."),
    ),
    _tool(
        "list_files",
        "Lists the files of a folder, with their sizes and when they were changed last.",
        ["folder"],
        folder=(_TEXT, "The folder, from the root of the project."),
        depth=(_NUMBER, "How many levels of folders to open; 1 by default."),
    ),
    _tool(
        "run",
        "Runs a command in a shell in the root of the project and returns what it printed and its exit status. "
        "Commands that ask for input fail. A command that takes longer than its limit is stopped.",
        ["command"],
        command=(_TEXT, "The command line."),
        limit_s=(_NUMBER, "Seconds that it may take; 120 by default, 600 at most."),
        background=(_YES_OR_NO, "Return at once and let it run; its output is read with `output`."),
    ),
    _tool(
        "fetch",
        "Loads a page from the web and returns it as Markdown. Pages that need a login cannot be loaded.",
        ["url"],
        url=(_TEXT, "The address, with https."),
        question=(_TEXT, "What to look for; only passages about it are returned."),
    ),
    _tool(
        "plan",
        "Records the steps of a larger task, so that the user sees what is done and what is left. Give all steps each "
        "time; exactly one of them is in progress.",
        ["steps"],
        steps=(
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "text": _TEXT,
                        "state": {"type": "string", "enum": ["open", "in progress", "done"]},
                    },
                    "required": ["text", "state"],
                },
            },
            "The steps in order.",
        ),
    ),
)


def folder_for(model: Path, folder: Path) -> Path:
    """The model with the template and the context of this conversation; weights and tokenizer are links."""
    folder.mkdir()
    own = {"config.json", "chat_template.jinja", "tokenizer_config.json", "mantou.json"}
    for path in model.iterdir():
        if path.name not in own:
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def beginning() -> list[dict[str, str]]:
    """The system message: about 1.9k tokens of instructions beside the tools."""
    return [
        {"role": "system", "content": "You work on the user's project with the tools. " + long_text(1900)}
    ]


def addition(turn: int) -> dict[str, str]:
    """What comes between two answers: a task at first, then what a tool has returned."""
    if turn % 5 == 0:
        return {"role": "user", "content": f"Task {turn}: " + long_text(60)}
    lines = "\n".join(f"{turn * 40 + n}\t{long_text(8 + n % 5)}" for n in range(33))
    return {"role": "tool", "content": lines}
