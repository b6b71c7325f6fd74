"""Compiled steps give what steps give that are built one by one. GPUs have them in force; here they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mantou.cache.ram import RamStore
from mantou.data import Sampling
from mantou.models import compiled, runner
from mantou.models.runner import Runner
from mantou.protocols import Group
from tests.compose.harness import VOCAB, Case, own_model, requests, run, scheme
from tests.compose.probe import STAGGERED
from tests.fakes import NoisyOracle

WANTED = requests([Sampling(), Sampling(temperature=0.8), Sampling(temperature=1.0, top_p=0.9)] * 2)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiled, runner):
        monkeypatch.setattr(module, "WORTH_IT", 1)


@pytest.mark.parametrize(("family", "codec"), [("llama", "off"), ("gemma3_text", "8")])
def test_compiled_steps_with_drafts_hits_and_neighbours_give_the_same_tokens(family: str, codec: str) -> None:
    """Rings wrap at 32 columns on the way; rows join and leave, so shapes change."""
    plain = run(Case(family, codec=codec, bucketed=True, ring_slack=16, chunk=16), WANTED)
    store = RamStore(1 << 28)
    case = Case(
        family,
        rows=4,
        codec=codec,
        bucketed=True,
        ring_slack=16,
        chunk=16,
        store=store,
        provider=NoisyOracle({**plain.tokens}, 0.7, VOCAB),
        compiles=True,
    )
    for arrivals in (STAGGERED, None):
        outcome = run(case, WANTED, arrivals)
        assert outcome.tokens == plain.tokens
        steps = outcome.step.runner.compiled
        assert steps is not None
        assert (steps.num_compiled > 0, steps.off) == (True, None)


class Counted(nn.Module):
    """A graph that counts how often it is built, and may ask how long its rows are."""

    def __init__(self, inner: Any, *, nosy: bool = False) -> None:
        super().__init__()
        self.inner, self._nosy, self.built = inner, nosy, 0

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.built += 1
        if self._nosy and cache is not None:
            assert cache[0].geometry.longest >= 0
        return self.inner(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        if name in self or "inner" not in self:
            return super().__getattr__(name)
        return getattr(self["inner"], name)


def decoded(subject: Runner, steps: int = 6) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Logits and hidden states of two rows, one of which is a token longer."""
    subject.kv.resize(2)
    for step in range(steps):
        group = Group(0, 1, (1, min(step, 1)))
        fed = [[7 + step], [9 + step][: group.num_tokens[1]]]
        _, logits = subject.forward(group, fed, None)
        hidden = subject.take_hidden()
        yield np.array(logits), None if hidden is None else np.array(hidden)
        subject.launch(None)
        subject.kv.commit(group, group.num_tokens)


def make(graph: Any, *, compiles: bool) -> Runner:
    loaded = own_model("llama")
    loaded = replace(loaded, module=graph(loaded.module))
    return Runner(loaded, scheme("off"), span_step=64, compiles=compiles)


def test_a_step_that_comes_again_is_not_built_again() -> None:
    eager, subject = (make(Counted, compiles=compiles) for compiles in (False, True))
    for one in (eager, subject):
        one.model.module.built = 0
    for (want, _), (got, _) in zip(decoded(eager), decoded(subject), strict=True):
        assert np.array_equal(want, got)
    assert eager.model.module.built == 6
    assert (
        subject.model.module.built == 3
    )  # before there are buffers, before it is worth it, and to compile it
    assert subject.compiling == {"shapes": 1, "off": None}


def test_hidden_states_come_from_compiled_steps_as_well() -> None:
    eager, subject = (make(Counted, compiles=compiles) for compiles in (False, True))
    for one in (eager, subject):
        one.tap((0, 1))
        one.capture_hidden()
    for (_, want), (_, got) in zip(decoded(eager), decoded(subject), strict=True):
        assert want is not None
        assert got is not None
        assert np.array_equal(want, got)
    assert subject.compiled is not None
    assert subject.compiled.num_compiled == 1


def test_a_graph_that_asks_for_host_lengths_is_built_in_every_step_and_says_so() -> None:
    subject = make(lambda inner: Counted(inner, nosy=True), compiles=True)
    eager = make(Counted, compiles=False)
    for (want, _), (got, _) in zip(decoded(eager), decoded(subject), strict=True):
        assert np.array_equal(want, got)
    assert subject.compiling == {
        "shapes": 0,
        "off": "the graph cannot be compiled (it asks for the longest of its rows)",
    }


@pytest.mark.parametrize("family", ["llama4", "mamba"])
def test_graphs_of_one_offset_or_with_states_are_built_in_every_step(family: str) -> None:
    outcome = run(Case(family, rows=2, bucketed=True, compiles=True, chunk=16), WANTED[:2])
    assert outcome.tokens == run(Case(family, bucketed=True, chunk=16), WANTED[:2]).tokens
    assert outcome.step.runner.compiling is None


def test_warming_up_compiles_and_leaves_nothing() -> None:
    subject = make(Counted, compiles=True)
    assert subject.warm_up() == ()
    assert subject.compiling == {"shapes": 9, "off": None}
    assert (subject.kv.num_slots, subject.kv.nbytes, subject.take_hidden()) == (0, 0, None)
    want = list(decoded(make(Counted, compiles=False)))
    assert all(np.array_equal(got, w) for (got, _), (w, _) in zip(decoded(subject), want, strict=True))


def test_the_ready_card_says_if_nothing_can_be_compiled() -> None:
    (note,) = make(lambda inner: Counted(inner, nosy=True), compiles=True).warm_up()
    assert note.endswith("the graph cannot be compiled (it asks for the longest of its rows)")
