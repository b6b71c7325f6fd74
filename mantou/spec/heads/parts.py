"""What every kind of head is made of: a folder's weights, decoder layers of its own, the target's head on fewer tokens.

Knows arrays and layouts; no kind of head, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.kv.batch import KVBatch
from mantou.kv.geometry import WriteRows, no_write_rows
from mantou.kv.plan import KVPlan
from mantou.kv.recurrent import RecurrentState
from mantou.kv.shapes import LayerShape
from mantou.models.checkpoint import read_json, weight_files
from mantou.models.head import Vocabulary
from mantou.models.layouts import make_layouts
from mantou.models.load import read_weights

_GROUPS = (64, 32)  # of packed weights, the first that fits
_BITS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head helps, as the head needs it."""

    name: str
    vocab_size: int
    dtype: mx.Dtype
    vocabulary: Vocabulary
    plan: Callable[[Sequence[LayerShape]], KVPlan]  # how a head's own keys and values are stored
    install: Callable[[Any], Sequence[str]]  # the device's own building blocks into a graph
    num_layers: int
    packs: bool = False  # whether a head's dense layers are packed at load
    span_step: int = 1
    write_rows: WriteRows = no_write_rows
    shapes: Sequence[LayerShape] = ()  # what its own layers keep of a token

    @property
    def hidden_size(self) -> int:
        return self.vocabulary.rows(mx.zeros(1, mx.int32)).shape[-1]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head's folder, read but not evaluated."""

    folder: Path
    config: Mapping[str, Any]
    weights: dict[str, mx.array]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Raises ModelError in one sentence."""
        return cls(folder, read_json(folder / "config.json"), read_weights(weight_files(folder)))

    def size(self, name: str) -> int:
        """An integer of the configuration."""
        value = self.config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(
                f"{self.folder}/config.json has no {name}; this is not a draft head that mantou knows."
            )
        return value

    def check(self, target: Target) -> None:
        """Raises ModelError unless head and target have the same width and vocabulary."""
        width, vocab = self.size("hidden_size"), self.size("vocab_size")
        if width != target.hidden_size:
            raise ModelError(
                f"{self.folder} continues hidden states of {width} numbers, and those of {target.name} have "
                f"{target.hidden_size}; choose the head that was trained for this model."
            )
        if vocab != target.vocab_size:
            raise ModelError(
                f"{self.folder} was trained for a vocabulary of {vocab} tokens, and {target.name} has "
                f"{target.vocab_size}; choose the head that was trained for this model."
            )

    def load_into(self, module: nn.Module, weights: Mapping[str, mx.array]) -> None:
        """The weights of a module, all of them. Raises ModelError."""
        if quantization := self.config.get("quantization"):
            _pack(module, quantization["group_size"], quantization["bits"], set(weights))
        try:
            module.load_weights(list(weights.items()), strict=True)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"The weights in {self.folder} do not fit its config.json ({reason}).") from None


def _pack(module: nn.Module, group_size: int, bits: int, names: set[str]) -> None:
    def choose(path: str, layer: Any) -> bool:
        return hasattr(layer, "to_quantized") and f"{path}.scales" in names

    nn.quantize(module, group_size=group_size, bits=bits, class_predicate=choose)


def finish(module: nn.Module, target: Target) -> None:
    """Numbers of the target's type, or packed: as they came, else at 8 bits; on the device's building blocks."""
    module.set_dtype(target.dtype)
    for path, layer in list(module.named_modules()):
        if not target.packs and type(layer) is nn.QuantizedLinear:
            _replace(module, path, _unpacked(layer))
        elif target.packs and type(layer) is nn.Linear and (group := _group(layer.weight.shape[-1])):
            _replace(module, path, layer.to_quantized(group, _BITS))
    module.eval()
    mx.eval(module.parameters())
    target.install(module)


def _unpacked(layer: Any) -> nn.Linear:
    weight = mx.dequantize(
        layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits, layer.mode
    )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in layer)
    linear.weight = weight
    if "bias" in layer:
        linear.bias = layer["bias"]
    return linear


def _group(width: int) -> int | None:
    return next((size for size in _GROUPS if width % size == 0), None)


def _replace(module: Any, path: str, layer: nn.Module) -> None:
    *parents, name = path.split(".")
    for part in parents:
        module = module[int(part)] if isinstance(module, list) else module[part]
    module[name] = layer


def fewer_tokens(target: Target, ids: mx.array) -> nn.Linear:
    """The target's head on the tokens `ids` alone."""
    rows = target.vocabulary.rows(ids)
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight = rows
    return head


def own_rows(layers: int, kv_heads: int, head_dim: int, target: Target) -> KVBatch:
    """An empty KV batch for a head's decoder layers."""
    size = target.dtype.size
    heads = (kv_heads, head_dim)
    shapes = tuple(LayerShape(i, "full", keys=heads, values=heads, itemsize=size) for i in range(layers))
    plan = target.plan(shapes)
    return KVBatch(
        lambda num_slots: make_layouts(plan, num_slots, 1, RecurrentState),
        span_step=target.span_step,
        write_rows=target.write_rows,
    )


def draft_ids(checkpoint: Checkpoint) -> mx.array | None:
    """The target's token for each draft token; None if they are the same."""
    offsets = checkpoint.weights.get("d2t")
    if offsets is None:
        return None
    ids = mx.arange(offsets.shape[0]) + offsets.astype(mx.int32)
    if int(ids.max()) >= checkpoint.size("vocab_size") or int(ids.min()) < 0:
        raise ModelError(f"d2t in {checkpoint.folder} names tokens outside of its vocabulary.")
    return ids.astype(mx.int32)
