from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mantou.chat.template import ChatTemplate
from mantou.chat.tokenizer import Tokenizer
from mantou.data import Message, ModelInfo
from tests.parity.cases import CONVERSATIONS, KV8
from tests.parity.conftest import Answer, Side
from tests.parity.stored import Reference, asked

NAMES = tuple(CONVERSATIONS)
LONGEST, SHORTEST = "turns", "system"


@dataclass(frozen=True)
class Bounds:
    """Largest distance from mlx_lm. The starter's logits reach 38 and its log-probabilities some -20."""

    logits: float
    logprobs: float


EXACT = Bounds(0.0, 0.0)
# Other arithmetic, the same function. Measured with the AVX-512 kernels: logits 0.07, log-probabilities 0.003.
CLOSE = Bounds(0.25, 0.02)
# There, a value near the middle of two steps of 8 bits goes to the other one. Measured: 0.68 and 0.06.
CLOSE_KV8 = Bounds(2.0, 0.25)


def bounds(info: ModelInfo) -> Bounds:
    """On a CPU without kernels mantou runs mlx_lm's own graph in the same order: not one bit may differ."""
    stock = info.device.startswith("CPU") and not any(note.startswith("CPU kernels:") for note in info.notes)
    if stock:
        return EXACT
    return CLOSE if info.kv_scheme == "native" else CLOSE_KV8


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max())


@pytest.fixture(scope="module")
def batched(side: Callable[..., Side], references: dict[str, Reference]) -> dict[str, Answer]:
    """Every conversation in one batch of four rows."""
    prompts = [references[name].prompt for name in NAMES]
    return dict(zip(NAMES, side(batch=4).answers(prompts), strict=True))


def test_prompts_are_those_of_transformers(folder: Path, references: dict[str, Reference]) -> None:
    template = ChatTemplate.load(folder, Tokenizer.load(folder))
    rendered = {
        name: list(template.render([Message(**turn) for turn in turns]).tokens)
        for name, turns in CONVERSATIONS.items()
    }
    assert rendered == {name: references[name].prompt for name in NAMES}


def test_stored_answers_are_those_of_mlx_lm(
    folder: Path, references: dict[str, Reference], tmp_path: Path
) -> None:
    """One conversation in each run, the shortest. Where nothing is stored, it is asked for twice."""
    [(_, live)] = asked(folder, tmp_path, [(SHORTEST,)]).items()
    kept = references[SHORTEST]
    assert live.prompt == kept.prompt
    assert live.tokens == kept.tokens
    # Another processor may round stock MLX's sums in another order.
    assert distance(live.logprobs, kept.logprobs) < 1e-3
    assert distance(live.prefill[:, :: kept.step], kept.prefill) < 1e-2


def test_prefill_logits(side: Callable[..., Side], references: dict[str, Reference]) -> None:
    mine, reference = side(batch=4), references["default"]
    logits = mine.prefill(reference.prompt)[:, :: reference.step]
    assert distance(logits, reference.prefill) <= bounds(mine.info).logits


@pytest.mark.parametrize("name", NAMES)
def test_four_rows_say_what_mlx_lm_says_of_each(
    name: str, side: Callable[..., Side], references: dict[str, Reference], batched: dict[str, Answer]
) -> None:
    answer, reference = batched[name], references[name]
    assert answer.tokens == reference.tokens
    assert distance(answer.logprobs, reference.logprobs) <= bounds(side(batch=4).info).logprobs


def test_a_row_alone_equals_its_row_in_the_batch(
    side: Callable[..., Side], references: dict[str, Reference], batched: dict[str, Answer]
) -> None:
    mine = side(batch=4)
    [alone] = mine.answers([references[LONGEST].prompt])
    assert alone.tokens == batched[LONGEST].tokens
    assert distance(alone.logprobs, batched[LONGEST].logprobs) <= bounds(mine.info).logprobs


def test_chunked_prefill_equals_whole(
    side: Callable[..., Side], references: dict[str, Reference], batched: dict[str, Answer]
) -> None:
    mine = side(batch=4, prefill_chunk=16)
    prompt = references[LONGEST].prompt
    assert len(prompt) > 2 * 16
    [chunked] = mine.answers([prompt])
    assert chunked.tokens == batched[LONGEST].tokens
    assert distance(chunked.logprobs, batched[LONGEST].logprobs) <= bounds(mine.info).logprobs


def test_quantised_keys_and_values(side: Callable[..., Side], references: dict[str, Reference]) -> None:
    mine, reference, plain = side(batch=4, kv_quant="8"), references["kv8"], references[KV8]
    assert distance(reference.prefill, plain.prefill) > 0  # else this would compare nothing
    logits = mine.prefill(reference.prompt)[:, :: reference.step]
    assert distance(logits, reference.prefill) <= bounds(mine.info).logits
    [answer] = mine.answers([reference.prompt])
    assert answer.tokens == reference.tokens
    assert distance(answer.logprobs, reference.logprobs) <= bounds(mine.info).logprobs
