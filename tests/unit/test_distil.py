"""A head is trained as it is served: what the script computes round by round is what a chain of guesses computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mantou.kv.codecs import make_scheme
from mantou.models.head import Vocabulary
from mantou.protocols import Group
from mantou.spec.heads.eagle import Eagle
from mantou.spec.heads.parts import Target

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WIDTH, VOCAB, LENGTH = 32, 50, 11


@pytest.fixture
def distil(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from distil import sampling, training  # type: ignore[import-not-found]

    return SimpleNamespace(training=training, sampling=sampling)


def params_of(training: Any, shape: Any) -> dict[str, mx.array]:
    """Random weights that bfloat16 holds exactly, because a checkpoint does."""
    norm = 1 + 0.1 * mx.random.normal((WIDTH,), key=mx.random.key(1))
    module = SimpleNamespace(
        model=SimpleNamespace(
            embed_tokens=SimpleNamespace(weight=mx.random.normal((VOCAB, WIDTH), key=mx.random.key(2))),
            norm=SimpleNamespace(weight=norm),
        )
    )
    params = training.initial(module, shape, 1.0, 3)
    grown = {n: 4 * w if "o_proj" in n or "down_proj" in n else w for n, w in params.items()}
    return {name: w.astype(mx.bfloat16).astype(mx.float32) for name, w in grown.items()}


def test_rounds_of_training_are_the_guesses_of_serving(distil: Any, tmp_path: Path) -> None:
    training = distil.training
    shape = training.Shape(WIDTH, 64, 4, 2, 8, 1e-5, 10000.0, VOCAB)
    params = params_of(training, shape)
    embedding = mx.random.normal((VOCAB, WIDTH), key=mx.random.key(2))
    ids = mx.array(list(range(0, VOCAB, 3)), mx.int32)
    head = training.Head(shape, LENGTH, embedding, embedding[ids])
    training.save(tmp_path, params, shape, ids, {})
    vocabulary = Vocabulary(
        lambda tokens: embedding[tokens], lambda x: x @ embedding.T, lambda rows: embedding[rows], False
    )
    plan = make_scheme("off").plan
    graph = Eagle(tmp_path, Target("tiny", VOCAB, mx.float32, vocabulary, plan, lambda module: (), 1))
    tokens = mx.random.randint(0, VOCAB, (1, LENGTH + 1), key=mx.random.key(5)).astype(mx.int32)
    hidden = mx.random.normal((1, LENGTH + 1, WIDTH), key=mx.random.key(6))
    rounds = head.rounds(params, tokens, hidden, 4)
    for known in (1, 3, 6):  # pairs with true hidden states
        graph.kv.resize(0)
        graph.kv.resize(1)
        group = Group(0, known, (known,))
        graph.kv.begin(group)
        estimate = graph(tokens[:, 1 : known + 1], hidden[:, :known])[:, -1:]
        graph.kv.commit(group, (known,))
        for number, expected in enumerate(rounds):
            at = known - 1 + number
            np.testing.assert_allclose(np.array(estimate), np.array(expected[:, at : at + 1]), atol=1e-4)
            np.testing.assert_allclose(
                np.array(graph.logits(estimate)), np.array(head.logits(expected[:, at : at + 1])), atol=1e-3
            )
            graph.kv.begin(Group(0, 1, (1,)))
            estimate = graph(tokens[:, at + 2 : at + 3], estimate)
            graph.kv.commit(Group(0, 1, (1,)), (1,))


def test_a_step_against_the_gradient_lowers_the_loss(distil: Any) -> None:
    training = distil.training
    shape = training.Shape(WIDTH, 64, 4, 2, 8, 1e-5, 10000.0, VOCAB)
    params = params_of(training, shape)
    embedding = mx.random.normal((VOCAB, WIDTH), key=mx.random.key(2))
    head = training.Head(shape, LENGTH, embedding, embedding[::2])
    tokens = mx.random.randint(0, VOCAB, (2, LENGTH + 1), key=mx.random.key(5)).astype(mx.int32)
    hidden = mx.random.normal((2, LENGTH + 1, WIDTH), key=mx.random.key(6))
    answers = mx.arange(LENGTH + 1)[None] > mx.array([[3], [5]])

    def loss(p: dict[str, mx.array]) -> mx.array:
        return training.loss(p, head, tokens, hidden, answers, 1.0, 3, training.Weights())

    before, gradients = mx.value_and_grad(loss)(params)
    after = loss({name: w - 0.01 * gradients[name] for name, w in params.items()})
    assert float(after) < float(before)
    unseen = mx.zeros_like(answers)
    assert float(training.loss(params, head, tokens, hidden, unseen, 1.0, 3, training.Weights())) == 0
