"""Gemma 4's assistants: the graph against the same in numpy from the checkpoint's numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mantou.errors import ModelError
from mantou.kv.lending import Seen
from mantou.spec.heads.assistant import Assistant, Context
from mantou.spec.heads.donors import DonorDraft
from mantou.spec.heads.kinds import HEADS, kind_of, load_head, measure
from tests.compose.heads import assistant_folder, eagle_folder, target

FAMILY = "gemma4_text"
Weights = Mapping[str, np.ndarray]


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rope(x: np.ndarray, position: int, theta: float, rotated: int) -> np.ndarray:
    """Of [H, d]: pairs (i, i + d / 2), the first `rotated` / 2 of them turn."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-2.0 * np.arange(half) / x.shape[-1])
    angles[rotated // 2 :] = 0
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[H, d] over [Hkv, S, d], scores as they are."""
    found = []
    for head, query in enumerate(q):
        of = head * len(keys) // len(q)
        scores = keys[of] @ query
        chances = np.exp(scores - scores.max())
        found.append(chances / chances.sum() @ values[of])
    return np.stack(found)


def assistant(
    w: Weights, known: np.ndarray, hidden: np.ndarray, position: int, kv: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """(what the head sees, the next hidden state) of one pair [D], [D]. `kv`: of the window, of the whole context."""
    x = w["pre_projection.weight"] @ np.concatenate([known, hidden])
    for i, (keys, values) in enumerate(kv):
        part = {n.removeprefix(f"model.layers.{i}."): a for n, a in w.items() if f"layers.{i}." in n}
        h = norm(x, part["input_layernorm.weight"])
        q = norm((part["self_attn.q_proj.weight"] @ h).reshape(4, -1), part["self_attn.q_norm.weight"])
        q = rope(q, position, *((1e6, q.shape[-1] // 4) if i else (1e4, q.shape[-1])))
        h = part["self_attn.o_proj.weight"] @ attention(q, keys, values).reshape(-1)
        x = x + norm(h, part["post_attention_layernorm.weight"])
        h = norm(x, part["pre_feedforward_layernorm.weight"])
        h = gelu(part["mlp.gate_proj.weight"] @ h) * (part["mlp.up_proj.weight"] @ h)
        x = x + norm(part["mlp.down_proj.weight"] @ h, part["post_feedforward_layernorm.weight"])
        x = x * part["layer_scalar.weight" if "layer_scalar.weight" in part else "layer_scalar"]
    x = norm(x, w["model.norm.weight"])
    return x, w["post_projection.weight"] @ x


def weights_of(folder: Path) -> Weights:
    read: Any = mx.load(str(folder / "model.safetensors"))
    return {name: np.array(array.astype(mx.float32), np.float64) for name, array in read.items()}


@pytest.mark.parametrize("groups", [0, 97])
def test_the_graph_computes_what_its_checkpoint_says(groups: int, tmp_path: Path) -> None:
    """Two rows of other lengths, two links of a chain; 5 and 3 columns of the window, 9 and 4 of the whole."""
    folder = assistant_folder(FAMILY, tmp_path, groups=groups)
    helped, w = target(FAMILY), weights_of(folder)
    graph = Assistant(folder, helped)
    dice = np.random.default_rng(0)
    shapes = [helped.shapes[place] for place in graph.donors]
    assert [shape.layout for shape in shapes] == ["window", "full"]
    assert graph.donors == (0, 1)  # the layers above have none of their own
    lengths, counts = [9, 4], [[5, 3], [9, 4]]
    kv = [dice.normal(size=(2, 2, *shape.keys[:1], 9, shape.keys[1])) for shape in shapes]
    seen = [
        Seen(
            *(mx.array(part.astype(np.float32)) for part in pair),
            (mx.arange(9) < mx.array(held)[:, None])[:, None, None],
        )
        for pair, held in zip(kv, counts, strict=True)
    ]
    context = Context(seen, mx.array(lengths, mx.int32))
    tokens = mx.array([[5], [80]], mx.int32)
    hidden = mx.array(dice.normal(size=(2, 1, helped.hidden_size)).astype(np.float32))
    for _ in range(2):
        features, following = graph(tokens, hidden, context)
        logits = np.array(graph.logits(features))[:, 0]
        known = np.array(helped.vocabulary.embed(tokens))[:, 0] * helped.hidden_size**0.5
        for row in range(2):
            own = [
                (pair[0, row, :, : held[row]], pair[1, row, :, : held[row]])
                for pair, held in zip(kv, counts, strict=True)
            ]
            x, expected = assistant(w, known[row], np.array(hidden)[row, 0], lengths[row], own)
            np.testing.assert_allclose(np.array(following)[row, 0], expected, atol=2e-4, rtol=2e-4)
            scores = w["model.embed_tokens.weight"] @ x
            if groups:
                best = np.argsort(-(w["masked_embedding.centroids.weight"] @ x))[:2]
                best = w["masked_embedding.token_ordering"].astype(int)[best]
                assert sorted(np.flatnonzero(np.isfinite(logits[row]))) == sorted(best)
                np.testing.assert_allclose(logits[row][best], scores[best], atol=2e-4, rtol=2e-4)
            else:
                np.testing.assert_allclose(logits[row], scores, atol=2e-4, rtol=2e-4)
        tokens, hidden = mx.array([[7], [8]], mx.int32), following


def test_it_is_known_by_its_weights_and_timed_without_a_row(tmp_path: Path) -> None:
    folder = assistant_folder(FAMILY, tmp_path)
    assert kind_of(folder) == "assistant"
    assert HEADS["assistant"].provider is DonorDraft
    graph = load_head("assistant", folder, target(FAMILY))
    costs = measure(DonorDraft, graph, 2, 128)
    assert 0 < costs.seconds(2, 1) < 1


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    mine = assistant_folder(FAMILY, tmp_path / "mine")
    for family, sentence in (
        ("llama", "attends to a layer that keeps a window of the context, and llama has none"),
        ("gemma3_text", "reads keys of 64 numbers with 4 heads, and gemma3_text keeps 2 heads of 32"),
    ):
        with pytest.raises(ModelError, match=sentence):
            Assistant(mine, target(family))
    wide = assistant_folder(FAMILY, tmp_path / "wide", backbone_hidden_size=256)
    with pytest.raises(ModelError, match="continues hidden states of 256 numbers"):
        Assistant(wide, target(FAMILY))
    uneven = assistant_folder(FAMILY, tmp_path / "uneven", groups=13)
    with pytest.raises(ModelError, match="do not share out its 97 tokens"):
        Assistant(uneven, target(FAMILY))
    with pytest.raises(ModelError, match="this is not a Gemma 4 assistant"):
        Assistant(eagle_folder(FAMILY, tmp_path / "eagle"), target(FAMILY))
    with pytest.raises(ModelError, match="of the kind eagle but one of the kind assistant"):
        load_head("eagle", mine, target(FAMILY))
