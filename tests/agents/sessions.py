"""What the scripted model does in each agent's session. Knows no client's set-up (`live`).

In every text, `{word}` is what notes.txt says and `{cwd}` the folder, both as the prompt shows them by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.agents.families import Say

PROMPT = "Find out which word notes.txt holds and write it, alone, into answer.txt. Then tell me the word."
AGAIN = "Which word was it?"
SEARCH = "Which jobs are scheduled in this session? Look for a tool that knows."
WORD = "marzipan"
NOTES = f"Shopping list.\nthe word is {WORD}\nNothing else.\n"
ASIDE = Say("A word from a file")  # the answer to requests that offer no tools: titles and the like
Call = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Session:
    """`sign`: what only this agent's tools say; with a prompt of its own it tells sessions apart. `turns`: answers.

    The agent is told the `prompts` one after the other, the later ones by a run that resumes the session.
    """

    sign: str
    turns: tuple[Say, ...]
    prompts: tuple[str, ...] = (PROMPT, AGAIN)

    def is_of(self, tools: str, prompt: str) -> bool:
        return self.sign in tools and self.prompts[0] in prompt


def _session(sign: str, read: Call, write: Call) -> Session:
    return Session(
        sign,
        (
            Say(
                "I will look into the file.", "The user wants a word from notes.txt. First read it.", (read,)
            ),
            Say("", "The file says {word}. Write it.", (write,)),
            Say("The word was {word}; answer.txt holds it now.", "Both are done."),
            Say("It was {word}.", "I know that from the file."),
        ),
    )


SESSIONS: Mapping[str, Session] = {
    "codex": _session(
        '"exec_command"',
        ("exec_command", {"cmd": "cat notes.txt"}),
        ("exec_command", {"cmd": "printf '%s\\n' '{word}' > answer.txt && cat answer.txt"}),
    ),
    "claude": _session(
        '"file_path"',
        ("Read", {"file_path": "{cwd}/notes.txt"}),
        ("Write", {"file_path": "{cwd}/answer.txt", "content": "{word}\n"}),
    ),
    "claude-search": Session(
        '"ToolSearch"',
        (
            Say("", "A tool for that may exist.", (("ToolSearch", {"query": "select:CronList"}),)),
            Say("", "There it is.", (("CronList", {}),)),
            Say("No jobs are scheduled.", "It says that there are none."),
        ),
        (SEARCH,),
    ),
    "opencode": _session(
        '"filePath"',
        ("read", {"filePath": "{cwd}/notes.txt"}),
        ("write", {"filePath": "{cwd}/answer.txt", "content": "{word}\n"}),
    ),
    "pi": _session(
        '"path"',
        ("read", {"path": "notes.txt"}),
        ("write", {"path": "answer.txt", "content": "{word}\n"}),
    ),
}


def session_of(run: str) -> Session:
    """The session of a run such as pi-chat."""
    return SESSIONS.get(run) or SESSIONS[run.partition("-")[0]]
