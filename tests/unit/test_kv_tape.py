"""Recurrent layers stop at any kept length without a second forward, with the state of a forward that ended there."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mantou.kv.codecs import make_scheme
from mantou.kv.tape import current
from mantou.models.runner import Runner
from mantou.protocols import Group
from tests.compose.harness import VOCAB, model

TAPED = (
    "qwen3_5",
    "qwen3_next",
    "mamba2",
    "nemotron_h",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "falcon_h1",
    "plamo2",
)
ROWS, WIDTH = 3, 5


def fed(runner: Runner, tokens: Sequence[Sequence[int]], *, slot: int = 0, rewindable: bool = False) -> Group:
    counts = tuple(len(row) for row in tokens)
    group = Group(slot, max(counts), counts)
    _, logits = runner.forward(group, tokens, None, rewindable=rewindable)
    mx.eval(logits, runner.kv.arrays())
    return group


def states(runner: Runner) -> list[np.ndarray]:
    return [stack.data for slot in range(ROWS) for stack in runner.kv.state(slot).stacks]


@pytest.mark.parametrize("family", TAPED)
@pytest.mark.parametrize("kept", [(1, 3, 5), (2, 2, 1), (5, 1, 4)])
def test_any_kept_length_is_reached_from_the_tape(family: str, kept: tuple[int, ...]) -> None:
    prompt = [[(7 * b + 3 * t) % VOCAB for t in range(6)] for b in range(ROWS)]
    draft = [[(11 * b + 5 * t + 1) % VOCAB for t in range(WIDTH)] for b in range(ROWS)]
    found = []
    for taped in (True, False):
        runner = Runner(model(family), make_scheme("off"), max_width=32)
        runner.kv.resize(ROWS)
        runner.kv.commit(fed(runner, prompt), (6,) * ROWS)
        if taped:
            assert runner.kv.commit(fed(runner, draft, rewindable=True), kept), "it asks for a second forward"
        else:
            for slot, num_tokens in enumerate(
                kept
            ):  # one by one: not every graph's padding leaves the state alone
                runner.kv.commit(fed(runner, [draft[slot][:num_tokens]], slot=slot), (num_tokens,))
        assert runner.kv.lengths == [6 + n for n in kept]
        found.append(states(runner))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert current() is None


@pytest.mark.parametrize("family", TAPED)
def test_padding_does_not_go_on_in_the_state(family: str) -> None:
    prompt = [[(7 * b + 3 * t) % VOCAB for t in range(6 - 2 * b)] for b in range(ROWS)]
    found = []
    for padded in (True, False):
        runner = Runner(model(family), make_scheme("off"), max_width=32)
        runner.kv.resize(ROWS)
        if padded:
            runner.kv.commit(fed(runner, prompt), (6, 4, 2))
        else:
            for slot, row in enumerate(prompt):
                runner.kv.commit(fed(runner, [row], slot=slot), (len(row),))
        found.append(states(runner))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_layer_that_keeps_what_no_tape_knows_asks_for_a_second_forward() -> None:
    runner = Runner(model("jamba"), make_scheme("off"), max_width=32)
    runner.kv.resize(1)
    runner.kv.commit(fed(runner, [[1, 2, 3]]), (3,))
    before = [stack.data for stack in runner.kv.state(0).stacks]
    group = fed(runner, [[4, 5, 6, 7]], rewindable=True)
    assert not runner.kv.commit(group, (2,))
    for one, other in zip(before, [stack.data for stack in runner.kv.state(0).stacks], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_prompt_leaves_no_tape() -> None:
    runner = Runner(model("qwen3_5"), make_scheme("off"), max_width=32)
    runner.kv.resize(1)
    fed(runner, [[1, 2, 3, 4]])
    assert all(getattr(layer, "_tape", None) is None for layer in runner.kv.layers)
    runner.abort()
