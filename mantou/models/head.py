"""Runs the vocabulary head on the wanted positions only, and lends it to drafters. Knows no requests.

A prompt chunk needs the logits of its last position at most, and the head costs a fifth of a small model. mlx-lm graphs
return logits of every position, so the module that projects onto the vocabulary is wrapped in place, and a probe after
wrapping proves that it is the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_HEAD_NAMES = ("lm_head", "output", "embed_out", "head", "output_layer")


class Selection:
    """Which positions of the running forward reach the head: int32[B, K], or None for all.

    With `capturing`, `hidden` keeps what all positions would have brought to it, [B, T, D].
    """

    def __init__(self) -> None:
        self.index: mx.array | None = None
        self.capturing = False
        self.hidden: mx.array | None = None
        self.project: Any = None  # the head itself: hidden states [..., D] -> logits [..., V]

    def apply(self, hidden: mx.array) -> mx.array:
        if self.capturing:
            self.hidden = hidden
        if self.index is None:
            return hidden
        return mx.take_along_axis(hidden, self.index[..., None], axis=1)


class SelectedHead(nn.Module):
    """A projection to the vocabulary behind a selection."""

    def __init__(self, inner: Any, selection: Selection) -> None:
        super().__init__()
        self.inner = inner
        self._selection = selection

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.inner(self._selection.apply(hidden))


class SelectedEmbedding(nn.Module):
    """A tied embedding: looks up as before, projects behind a selection."""

    def __init__(self, inner: Any, selection: Selection) -> None:
        super().__init__()
        self.inner = inner
        self._selection = selection

    @property
    def weight(self) -> mx.array:
        return self.inner.weight

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.inner(tokens)

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self.inner.as_linear(self._selection.apply(hidden))


def _candidates(module: nn.Module) -> list[tuple[nn.Module, str, type]]:
    """(parent, attribute, wrapper) of everything that may be the head, outermost first."""
    found: list[tuple[nn.Module, str, type]] = []
    for _, parent in module.named_modules()[::-1]:
        for name, child in parent.children().items():
            if not isinstance(child, nn.Module):
                continue
            if name in _HEAD_NAMES:
                found.append((parent, name, SelectedHead))
            elif hasattr(child, "as_linear"):
                found.append((parent, name, SelectedEmbedding))
    return sorted(found, key=lambda item: item[2] is SelectedEmbedding)


def install(module: Any) -> Selection | None:
    """Wraps the head of a loaded graph. None if none of its modules is the head: then all positions project.

    A selection that was installed before is taken out: a graph has the one of its newest runner.
    """
    for parent, name, _ in _candidates(module):
        parent[name] = _unwrapped(parent[name])
    selection = Selection()
    tokens = mx.zeros((1, 2), mx.int32)
    for parent, name, wrapper in _candidates(module):
        original = parent[name]
        parent[name] = wrapper(original, selection)
        selection.index = mx.zeros((1, 1), mx.int32)
        width = module(tokens).shape[1]  # shapes are known without evaluating anything
        selection.index = None
        if width == 1:
            selection.project = original.as_linear if wrapper is SelectedEmbedding else original
            return selection
        parent[name] = original
    return None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's own embedding and head do, for drafters that go without theirs."""

    embed: Callable[[mx.array], mx.array]  # tokens int32[...] -> [..., D]
    project: Callable[[mx.array], mx.array]  # what the head sees [..., D] -> logits [..., V]
    rows: Callable[[mx.array], mx.array]  # tokens int32[N] -> the head's weights of those tokens [N, D]
    packed: bool  # whether the head's weights are quantised


def vocabulary(module: Any, selection: Selection) -> Vocabulary | None:
    """Those of a graph with an installed selection; None if it has no embedding of tokens that can be told apart."""
    head = _unwrapped(getattr(selection.project, "__self__", selection.project))
    tied = hasattr(head, "as_linear")  # then it is the embedding
    others = [_unwrapped(m) for _, m in module.named_modules() if hasattr(m, "as_linear")]
    embedding = head if tied else max(others, key=_num_rows, default=None)
    if embedding is None:
        return None
    rows = head if tied else head.rows if hasattr(head, "rows") else partial(_rows, head)
    return Vocabulary(embedding, selection.project, rows, _is_packed(head))


def _unwrapped(head: Any) -> Any:
    while isinstance(head, SelectedHead | SelectedEmbedding):
        head = head.inner
    return head


def _num_rows(embedding: Any) -> int:
    packed = getattr(embedding, "packed", None)
    return int(packed.rows if packed is not None else embedding.weight.shape[0])


def _is_packed(head: Any) -> bool:
    packed = getattr(head, "packed", None)
    return "scales" in head or (packed is not None and packed.bits > 0)  # 0 bits: dense


def _rows(linear: Any, rows: mx.array) -> mx.array:
    if "scales" not in linear:
        return linear.weight[rows]
    biases = linear.get("biases")
    return mx.dequantize(
        linear["weight"][rows],
        linear["scales"][rows],
        None if biases is None else biases[rows],
        linear.group_size,
        linear.bits,
        linear.mode,
    )
