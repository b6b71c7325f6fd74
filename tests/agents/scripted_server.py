"""`python -m tests.agents.scripted_server FOLDER --family NAME --port N`: `mantou serve`, where a script says what the
model answers.

Everything but the choice of each token is the product's own: the forward, KV, prompt cache, batch, chat template, the
parsers of tools and reasoning, the HTTP dialects. FOLDER is written if it is not there. `--record FILE`
appends every exchange to it (`traffic`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mantou import build, cli
from mantou.api import server
from mantou.config import Config
from mantou.data import ModelInfo, Request
from mantou.engine.step import Step
from mantou.protocols import Constraint, Constraints
from tests.agents.families import FAMILIES, OFFER, Family, Say, write_folder
from tests.agents.sessions import ASIDE, SESSIONS
from tests.agents.traffic import Recorder
from tests.fakes import allows, packed

_FACTS = {
    "word": re.compile(r"the word is (\w+)"),
    "cwd": re.compile(r"(?:working directory: *|<cwd>)([^\s<]+)", re.IGNORECASE),
}
_load_step, _create_app = build.load_step, server.create_app


class Forced:
    """One answer, token by token. A grammar that the request has must allow every one of them."""

    def __init__(self, tokens: Sequence[int], vocab: int, grammar: Constraint | None) -> None:
        self.tokens, self.vocab, self.grammar, self.done = tokens, vocab, grammar, 0

    def mask(self) -> np.ndarray:
        token = self.tokens[min(self.done, len(self.tokens) - 1)]
        allowed = None if self.grammar is None else self.grammar.mask()
        if allowed is not None and not allows(allowed, token):
            raise RuntimeError(f"the grammar of the request forbids token {self.done} of the script")
        return packed(np.arange(self.vocab) == token)

    def advance(self, token: int) -> None:
        self.done += 1
        if self.grammar is not None:
            self.grammar.advance(token)

    def rewind(self, num_tokens: int) -> None:
        self.done -= num_tokens
        if self.grammar is not None:
            self.grammar.rewind(num_tokens)

    def forced(self) -> Sequence[int]:
        return self.tokens[self.done :]


class Script:
    """What each request is answered: its session's line for the number of answers that the prompt holds already."""

    def __init__(self, folder: Path, family: Family, grammars: Constraints) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._family, self._grammars = family, grammars

    def make(self, request: Request) -> Forced:
        prompt = self._backend.decode(list(request.prompt), skip_special_tokens=False)
        text = self._family.write(_filled(_line(prompt, self._family), prompt))
        tokens = self._backend.encode(text, add_special_tokens=False).ids
        assert tokens[-1] in request.eos, "an answer ends"
        return Forced(tokens, self._backend.get_vocab_size(), self._grammars.make(request))


def _line(prompt: str, family: Family) -> Say:
    _, offered, tools = prompt.partition(OFFER)
    if not offered:
        return ASIDE
    tools = tools.partition("</tools>")[0]
    session = next(one for one in SESSIONS.values() if one.is_of(tools, prompt))
    number = family.num_answers(prompt)
    assert number < len(session.turns), f"the script has no answer number {number}"
    return session.turns[number]


def _filled(say: Say, prompt: str) -> Say:
    """The line with what the prompt holds by now, so that an answer shows whether a tool's result came through."""
    found = {name: pattern.search(prompt) for name, pattern in _FACTS.items()}
    facts = {name: match[1] if match else "unknown" for name, match in found.items()}

    def fill(text: str) -> str:
        return re.sub(r"\{(word|cwd)\}", lambda place: facts[place[1]], text)

    calls = tuple((name, {key: fill(value) for key, value in given.items()}) for name, given in say.calls)
    return replace(say, text=fill(say.text), think=fill(say.think), calls=calls)


def _scripted_step(family: Family, folder: Path, config: Config, *others: Any) -> tuple[Step, ModelInfo]:
    step, info = _load_step(folder, config, *others)
    step.axes = replace(step.axes, constraints=Script(folder, family, step.axes.constraints))
    return step, info


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--record", type=Path)
    given, others = parser.parse_known_args()
    if not given.folder.exists():
        write_folder(given.folder, given.family)
    build.load_step = partial(_scripted_step, FAMILIES[given.family])
    if given.record is not None:
        server.create_app = lambda service: Recorder(_create_app(service), given.record)
    sys.argv = ["mantou", "serve", str(given.folder), *others]
    cli.main()


if __name__ == "__main__":
    main()
