"""Both sides of the comparison, each made once: mlx_lm in a child process, mantou's step in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mantou.build import load_step
from mantou.config import Config
from mantou.data import ModelInfo, Request, Sampling, TokenLogprobs
from mantou.engine.step import Step
from mantou.protocols import Group
from tests.parity.cases import NUM_TOKENS
from tests.real import ROOT, starter_folder


@dataclass(frozen=True)
class Reference:
    """What mlx_lm says of one conversation: its answer, and the logits [T, V] of the prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray
    prefill: np.ndarray


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: np.ndarray


@dataclass(frozen=True)
class Side:
    """mantou, loaded with some configuration."""

    step: Step
    info: ModelInfo

    def prefill(self, prompt: Sequence[int]) -> np.ndarray:
        """Logits [T, V] of one forward over the whole prompt."""
        runner = self.step.runner
        runner.kv.resize(1)
        _, logits = runner.forward(Group(0, len(prompt), (len(prompt),)), [list(prompt)], None)
        found = np.array(logits[0].astype(mx.float32))
        runner.kv.abort()
        runner.kv.resize(0)
        self.step.check_integrity()
        return found

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Greedy answers of NUM_TOKENS tokens, all requests at once."""
        for number, prompt in enumerate(prompts):
            sampling = Sampling(logprobs=True)
            self.step.submit(Request(str(number), tuple(prompt), sampling, max_tokens=NUM_TOKENS))
        rows: list[list[TokenLogprobs]] = [[] for _ in prompts]
        while self.step.busy:
            self.step.advance()
            for event in self.step.take_events():
                assert event.error is None
                rows[int(event.request_id)] += event.logprobs
        self.step.land()
        self.step.check_integrity()
        return [
            Answer([entry.token for entry in row], np.array([entry.logprob for entry in row])) for row in rows
        ]


# What each process computes; about equal in work, and two, because that is what CI has cores for.
_SHARES = (("default", "unicode"), ("system", "turns", "kv8"))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    out = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-m", "tests.parity.reference", str(starter_folder()), str(out)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    running = [
        subprocess.Popen([*command, *cases], cwd=ROOT, env=offline, stderr=subprocess.PIPE, text=True)
        for cases in _SHARES
    ]
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    found = {}
    for case in (case for cases in _SHARES for case in cases):
        with np.load(out / f"{case}.npz") as arrays:
            found[case] = Reference(**json.loads((out / f"{case}.json").read_text("utf-8")), **arrays)
    return found


@pytest.fixture(scope="session")
def folder() -> Path:
    return starter_folder()


@pytest.fixture(scope="session")
def side(folder: Path) -> Callable[..., Side]:
    """`side(kv_quant="8")`: mantou with that configuration, loaded once."""

    @cache
    def load(**options: object) -> Side:
        return Side(*load_step(folder, Config(model=str(folder), **options)))

    return load
