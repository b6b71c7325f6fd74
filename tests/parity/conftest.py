"""Both sides of the comparison, each made once: mlx_lm in a child process, mantou's step in this one."""

from __future__ import annotations

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
from tests.parity import stored
from tests.parity.cases import NUM_TOKENS
from tests.parity.stored import Reference, asked
from tests.real import starter_folder


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


@pytest.fixture(scope="session")
def kernels_run(side: Callable[..., Side]) -> bool:
    """Whether mantou computes with kernels of its own here, so that only near equality is asked for."""
    return any(note.startswith("CPU kernels:") for note in side(batch=4).info.notes)


@pytest.fixture(scope="session")
def references(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, kernels_run: bool
) -> dict[str, Reference]:
    """mlx_lm's answers. Asked of mlx_lm itself where every bit is compared; else those that stored.py keeps.

    Stock MLX takes ten times as long as the kernels do, so with them the tests would mostly wait for it. One of the
    stored answers is asked for again in each run (test_stored_answers_are_those_of_mlx_lm). Until the file is written
    (`python -m tests.parity.stored`) mlx_lm is asked for all.
    """
    if kernels_run and stored.FILE.exists():
        return stored.read(folder)
    return asked(folder, tmp_path_factory.mktemp("reference"), stored.SHARES)


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
