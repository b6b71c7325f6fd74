"""Decoder layers as one primitive each, over the engine's own row cache. Knows layer structure, no family by name.

A layer of a tiny step costs more in graph nodes (10 us each on a CPU) than in arithmetic. A block whose parts are those
of a pre-norm decoder layer is described to the kernels, and then both run on random input: it is fused only if every
bit agrees. The block itself stays, for caches that the primitive cannot write (quantised keys, wrapped rings).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.models.ops import modules
from mantou.models.ops.chain import Chain
from mantou.models.ops.extension import kernels

_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_GEMMA_BLOCK = _BLOCK | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "rope"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_HEADS = (
    ("n_heads", "n_kv_heads"),
    ("num_heads", "num_key_value_heads"),
    ("num_attention_heads", "num_key_value_heads"),
)
_GATES = ("silu", "gelu_tanh", "gelu_erf")


class FusedLayer(nn.Module):
    """A decoder block that runs as one primitive where it can. Attributes of the block show through."""

    def __init__(self, block: nn.Module, layer: Any, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self.block = block
        # In plain attributes, which nn.Module takes for no parameters.
        self._layer, self._kv_heads, self._head_dim, self._dtype = layer, kv_heads, head_dim, dtype
        self._linked = False  # whether the next layer takes what this one returns, and nothing else does

    @property
    def layer(self) -> Any:
        return self._layer

    @property
    def kv_heads(self) -> int:
        return self._kv_heads

    @property
    def head_dim(self) -> int:
        return self._head_dim

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype

    @property
    def linked(self) -> bool:
        return self._linked

    def as_block(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return self.block(x, mask=mask, cache=cache)

    def link(self, linked: bool) -> None:
        self._linked = linked

    def __call__(self, x: mx.array | Chain, mask: Any = None, cache: Any = None, **more: Any) -> Any:
        chain = x if isinstance(x, Chain) else Chain(x)
        if more:
            return self.block(chain.run(), mask=mask, cache=cache, **more)
        chain.add(self, mask, cache)
        return chain if self._linked else chain.run()

    def __getattr__(self, name: str) -> Any:
        if name in self or "block" not in self:
            return super().__getattr__(name)
        return getattr(self["block"], name)


def link(model: Any, layers: list[FusedLayer]) -> None:
    """Lets layers wait for the fused one behind each, if a trial shows that the graph just passes their result on.

    A `Chain` is no array: a graph that reads it, adds to it or gives it to anyone but a fused layer raises.
    """
    if not layers:
        return
    for layer in layers:
        layer.link(True)
    try:
        passed = isinstance(model(mx.zeros((1, 2), mx.int32)), mx.array)  # built, not run
    except (AttributeError, TypeError, ValueError, RuntimeError):
        passed = False
    for layer in layers:
        layer.link(passed)


# ------------------------------------------------------------------ what a block is
@dataclass(frozen=True, slots=True)
class _Described:
    arguments: dict[str, Any]  # of kernels.make_layer
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: mx.Dtype


def _heads(attention: Any) -> tuple[int, int] | None:
    for one, other in _HEADS:
        if isinstance(getattr(attention, one, None), int) and isinstance(
            getattr(attention, other, None), int
        ):
            return getattr(attention, one), getattr(attention, other)
    return None


def _rotary(rope: Any) -> dict[str, Any] | None:
    """Rotary arguments of the kinds in mlx-lm's rope_utils, or None for another."""
    dims = getattr(rope, "dims", getattr(rope, "dim", None))
    periods = getattr(rope, "_freqs", None)
    base = getattr(rope, "base", None) if type(rope) is nn.RoPE else None
    if dims is None or (periods is None) == (base is None):
        return None
    return {
        "rope_dims": dims,
        "rope_traditional": bool(getattr(rope, "traditional", False)),
        "rope_base": base,
        "rope_periods": periods,
        "rope_scale": float(rope.scale) if base is not None else 1.0,
        "rope_input_scale": float(getattr(rope, "mscale", getattr(rope, "_scale", 1.0))),
    }


def _norm_weight(norm: Any, eps: float) -> mx.array | None:
    """The weight with which an RMS norm multiplies (some add 1 to theirs first), or None if it is no such norm."""
    weight = norm.get("weight")
    if weight is None or getattr(norm, "eps", None) != eps:
        return None
    x = mx.random.normal((2, weight.shape[0]), key=mx.random.key(0)).astype(weight.dtype)
    y = norm(x)
    for candidate in (weight, 1.0 + weight):
        if bool(mx.array_equal(kernels.rms_norm(x, candidate, eps), y)):
            return candidate
    return None


def _norm_weights(parent: Any, names: list[str], eps: float) -> dict[str, mx.array] | None:
    """The weights of those norms that the parent has, or None if one of them is no RMS norm."""
    weights = {name: _norm_weight(parent[name], eps) for name in names if name in parent}
    known = {name: weight for name, weight in weights.items() if weight is not None}
    return known if len(known) == len(weights) else None


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, nn.QuantizedLinear) and modules.is_packable(module)


def _can_join(linears: list[Any], *, interleave: bool = False) -> bool:
    kinds = {
        (
            type(m),
            m["weight"].dtype,
            m["weight"].shape[-1],
            getattr(m, "bits", 0),
            getattr(m, "group_size", 0),
        )
        for m in linears
    }
    rows = [m["weight"].shape[0] for m in linears]
    biases = {"bias" in m for m in linears}
    return (
        len(kinds) == 1
        and len(biases) == 1
        and all(r % 16 == 0 for r in rows)
        and (not interleave or len(set(rows)) == 1)
    )


def _is_called_like_a_layer(block: Any) -> bool:
    """(x, mask, cache), whatever the first is called."""
    call = getattr(type(block), "__call__", None)  # noqa: B004 (the function itself is wanted)
    return call is not None and list(inspect.signature(call).parameters)[2:] == ["mask", "cache"]


def _shape_fits(block: Any) -> bool:
    """Whether the block's parts are those of a pre-norm layer with a packed gated MLP, and nothing else."""
    attention = block.children().get("self_attn")
    if not isinstance(attention, nn.Module) or not isinstance(block["mlp"], modules.PackedMLP):
        return False
    if not _is_called_like_a_layer(block) or set(block.children()) not in (_BLOCK, _GEMMA_BLOCK):
        return False
    if set(attention.children()) - {"q_norm", "k_norm"} != _ATTENTION:
        return False
    linears = [attention[n] for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return all(_is_linear(m) for m in linears) and _can_join(linears[:3])


def _pack_joined(parent: Any, names: tuple[str, ...], planes: int, *, interleave: bool = False) -> Any:
    """Packs several linear layers into one matrix and leaves each as a view of it."""
    parts = [parent[name] for name in names]
    packed = modules.pack(parts, interleave=interleave)
    for name, module, view in zip(names, parts, packed[1:] or packed, strict=True):
        parent[name] = modules.PackedLinear(module, view, planes)
    return packed[0]


def _gate_of(mlp: Any) -> str | None:
    """The gate with which an unpacked MLP equals down(gate(x Wg) * (x Wu)) in f32, or None."""
    x = mx.random.normal((4, _width(mlp["gate_proj"])), key=mx.random.key(0))
    g, u, want = mlp["gate_proj"](x), mlp["up_proj"](x), mlp(x)
    for gate in _GATES:
        got = mlp["down_proj"](kernels.gate(gate, g, u))
        # A GELU that MLX puts together from smaller steps is right to the last digits only.
        if float(mx.max(mx.abs(got - want))) <= 1e-5 * float(mx.max(mx.abs(want))):
            return gate
    return None


def _width(linear: Any) -> int:
    return (
        linear["weight"].shape[-1] * 32 // linear.bits if "scales" in linear else linear["weight"].shape[-1]
    )


def fuse_mlp(mlp: Any, planes: int) -> modules.PackedMLP | None:
    """The packed form of a gated MLP, or None (nothing packed) for another structure."""
    parts = mlp.children()
    if not parts.keys() >= _MLP or any(parts[n].parameters() for n in parts.keys() - _MLP):
        return None
    if len(inspect.signature(type(mlp).__call__).parameters) != 2:  # self, x
        return None
    linears = [mlp[n] for n in sorted(_MLP)]
    if not all(_is_linear(m) and "bias" not in m for m in linears):
        return None
    if not _can_join([mlp["gate_proj"], mlp["up_proj"]], interleave=True):
        return None
    gate = _gate_of(mlp)
    if gate is None:
        return None
    gate_up = _pack_joined(mlp, ("gate_proj", "up_proj"), planes, interleave=True)
    _pack_joined(mlp, ("down_proj",), planes)
    return modules.PackedMLP({n: mlp[n] for n in _MLP}, gate_up, gate)


def describe(block: Any, planes: int) -> _Described | None:
    """Packs the block's linear layers, joined, and describes it; None (nothing packed) for another structure."""
    if not _shape_fits(block):
        return None
    attention, mlp = block["self_attn"], block["mlp"]
    assert isinstance(mlp, modules.PackedMLP)
    counts, rotary, scale = _heads(attention), _rotary(attention["rope"]), getattr(attention, "scale", None)
    eps = getattr(block["input_layernorm"], "eps", None)
    if counts is None or rotary is None or not isinstance(scale, float) or eps is None:
        return None
    norms = _norm_weights(block, sorted(_GEMMA_BLOCK - {"self_attn", "mlp"}), eps)
    heads_norms = _norm_weights(attention, ["q_norm", "k_norm"], eps)
    if norms is None or heads_norms is None:
        return None
    heads, kv_heads = counts
    rows = [attention[n]["weight"].shape[0] for n in ("q_proj", "k_proj", "v_proj")]
    if rows[0] % heads or rows[1:] != [rows[0] // heads * kv_heads] * 2:
        return None  # a query gate, or values of another size
    hidden = attention["q_proj"]["weight"].shape[0] // heads, norms["input_layernorm"].shape[0]
    bias = None
    if "bias" in attention["q_proj"]:
        bias = mx.concatenate([attention[n]["bias"] for n in ("q_proj", "k_proj", "v_proj")])
    weights = {
        "qkv": _pack_joined(attention, ("q_proj", "k_proj", "v_proj"), planes),
        "out": _pack_joined(attention, ("o_proj",), planes),
        "gate_up": mlp.gate_up,
        "down": mlp.down_proj.packed,
    }
    gemma = "pre_feedforward_layernorm" in norms
    arguments = {
        **weights,
        **rotary,
        "input_norm": norms["input_layernorm"],
        "mlp_norm": norms["pre_feedforward_layernorm" if gemma else "post_attention_layernorm"],
        "attention_out_norm": norms["post_attention_layernorm"] if gemma else None,
        "mlp_out_norm": norms.get("post_feedforward_layernorm"),
        "query_norm": heads_norms.get("q_norm"),
        "key_norm": heads_norms.get("k_norm"),
        "qkv_bias": bias,
        "out_bias": attention["o_proj"].get("bias"),
        "eps": eps,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden[0],
        "scale": scale,
        "planes": planes,
        "gate": mlp.gate,
    }
    return _Described(arguments, kv_heads, hidden[0], hidden[1], block["input_layernorm"]["weight"].dtype)


class _GrowingCache:
    """What a block needs of a cache: keys and values of all tokens so far."""

    def __init__(self) -> None:
        self.offset = 0
        self._held: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        if self._held is not None:
            keys = mx.concatenate([self._held[0], keys], axis=2)
            values = mx.concatenate([self._held[1], values], axis=2)
        self._held = keys, values
        return keys, values


def _agree(block: Any, layer: Any, what: _Described) -> bool:
    """Whether block and primitive give the same bits on two steps of random input."""
    cache = _GrowingCache()
    keys, values = (mx.zeros((2, what.kv_heads, 8, what.head_dim), what.dtype) for _ in range(2))
    for step, width in enumerate((3, 2)):
        x = mx.random.normal((2, width, what.hidden), key=mx.random.key(step)).astype(what.dtype)
        start = mx.full((2,), cache.offset, mx.int32)
        # An array, because a few graphs cannot take the word "causal".
        mask = mx.arange(cache.offset + width) <= mx.arange(cache.offset, cache.offset + width)[:, None]
        want = block(x, mask=mask, cache=cache)
        got = kernels.layers(x, [layer], [[keys, values]], start)
        if got.dtype != want.dtype or not bool(mx.array_equal(got, want)):
            return False
    return True


def fuse(block: Any, planes: int) -> FusedLayer | None:
    """The fused form of a block whose MLP is packed, or None. Its linear layers may be packed either way."""
    what = describe(block, planes)
    if what is None or what.dtype == mx.float16:  # some blocks clip their float16 residuals
        return None
    layer = kernels.make_layer(**what.arguments)
    if not _agree(block, layer, what):
        return None
    return FusedLayer(block, layer, what.kv_heads, what.head_dim, what.dtype)
