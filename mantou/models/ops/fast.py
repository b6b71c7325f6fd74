"""The mx.fast entry points on the CPU kernels. Knows no model; whatever it cannot do goes to plain MLX.

mlx-lm graphs call `mx.fast.rms_norm`, `rope` and `scaled_dot_product_attention` by attribute, and MLX has no CPU kernel
for them: it falls back to a dozen scalar operations each. So the attributes are replaced, once and for the process.
Work on another device or stream, and types that the kernels do not know, reach the original function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from mantou.models.ops.extension import kernels

_FLOATS = (mx.float32, mx.bfloat16, mx.float16)


class MxFast(NamedTuple):
    """The entry points of mx.fast that have a CPU kernel."""

    rms_norm: Callable[..., mx.array]
    layer_norm: Callable[..., mx.array]
    rope: Callable[..., mx.array]
    scaled_dot_product_attention: Callable[..., mx.array]


PLAIN = MxFast(mx.fast.rms_norm, mx.fast.layer_norm, mx.fast.rope, mx.fast.scaled_dot_product_attention)
"""MLX's own, whatever is installed now."""


class Quantisation(NamedTuple):
    """MLX's packing of rows, which has no vector code on a CPU and takes a dozen operations to undo."""

    quantize: Callable[..., Any]
    dequantize: Callable[..., mx.array]


PLAIN_QUANTISATION = Quantisation(mx.quantize, mx.dequantize)


def _ours(stream: Any, *arrays: mx.array | None) -> bool:
    """Whether the call runs on the default CPU stream with float arrays."""
    if stream is not None or mx.default_device() != mx.cpu:
        return False
    return all(a is None or a.dtype in _FLOATS for a in arrays)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    if not _ours(stream, x, weight):
        return PLAIN.rms_norm(x, weight, eps, stream=stream)
    return kernels.rms_norm(x, weight, eps)


def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: Any = None
) -> mx.array:
    if not _ours(stream, x, weight, bias):
        return PLAIN.layer_norm(x, weight, bias, eps, stream=stream)
    return kernels.layer_norm(x, weight, bias, eps)


def rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    if not _ours(stream, a, freqs) or a.ndim < 3:
        return PLAIN.rope(
            a,
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
            stream=stream,
        )
    if not isinstance(offset, mx.array):
        offset = mx.array(offset, mx.int32)
    return kernels.rope(a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs)


def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    force_fused: bool = False,
    stream: Any = None,
) -> mx.array:
    known_mask = mask is None or isinstance(mask, mx.array) or mask in ("", "causal")
    if force_fused or not known_mask or not _ours(stream, q, k, v, sinks):
        return PLAIN.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream
        )
    if isinstance(mask, mx.array):
        return kernels.attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    return kernels.attention(q, k, v, scale=scale, causal=mask == "causal", sinks=sinks)


def _packable(x: mx.array, group_size: int | None, bits: int | None, mode: str, others: Any) -> bool:
    """Whether these are rows of keys or values in a form that the kernels pack."""
    known = group_size in (32, 64, 128) and bits in (4, 8) and mode == "affine"
    return known and x.ndim == 4 and x.size > 0 and not any(other is not None for other in others)


def quantize(
    w: mx.array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: Any = None,
    **others: Any,
) -> Any:
    ours = _packable(w, group_size, bits, mode, others.values()) and _ours(stream, w)
    if not ours or w.shape[-1] % (group_size or 1):
        return PLAIN_QUANTISATION.quantize(w, group_size, bits, mode, stream=stream, **others)
    return tuple(kernels.pack_rows(w, bits=bits, group=group_size))


def dequantize(
    w: mx.array,
    /,
    scales: mx.array,
    biases: mx.array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: Any = None,
    **others: Any,
) -> mx.array:
    """Nothing is unpacked if all that is done with the result is attention: that kernel reads the parts."""
    ours = _packable(w, group_size, bits, mode, others.values()) and _ours(stream, scales, biases)
    if not ours or biases is None or biases.dtype != scales.dtype:
        return PLAIN_QUANTISATION.dequantize(
            w, scales, biases, group_size, bits, mode, stream=stream, **others
        )
    return kernels.unpack_rows(w, scales, biases, bits=bits, group=group_size)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, as mlx_lm.models.activations.swiglu."""
    if not _ours(None, gate, x) or gate.dtype != x.dtype or gate.shape != x.shape:
        return gate * mx.sigmoid(gate) * x
    return kernels.gate("silu", gate, x)


def gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As mlx_lm.models.gated_delta.gated_delta_ops, which walks the steps in Python."""
    if state is None:
        state = mx.zeros((q.shape[0], v.shape[2], v.shape[3], q.shape[3]), dtype=mx.float32)
    y, new = kernels.gated_delta(q, k, v, g, beta, state, mask)
    return y, new.astype(state.dtype)


def ssm_attn(
    x: mx.array,
    a_log: mx.array,
    b: mx.array,
    c: mx.array,
    d: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    step: int = 256,
) -> tuple[mx.array, mx.array]:
    """As mlx_lm.models.ssm.ssm_attn, whose matrices grow with the square of `step`: here a step is a step."""
    rows, width, heads, head_dim = x.shape
    dtype = x.dtype if d.dtype == x.dtype else mx.float32
    dt = mx.clip(mx.logaddexp(dt.astype(mx.float32) + dt_bias, 0.0), *time_step_limit)
    if state is None:
        state = mx.zeros((rows, heads, head_dim, b.shape[3]), mx.float32)
    if lengths is not None:
        held = mx.arange(width)[None] < lengths[:, None]
        mask = held if mask is None else held & mask
    return tuple(kernels.ssm(x.astype(dtype), a_log, b, c, d, dt, state, mask))


# mlx-lm functions that plain MLX runs as many small operations: (module, name) -> ours. Graph files import some of them
# by name, so every module of the package that holds the original gets ours.
_MLX_LM: dict[tuple[str, str], Callable[..., Any]] = {
    ("mlx_lm.models.activations", "swiglu"): swiglu,
    ("mlx_lm.models.gated_delta", "gated_delta_ops"): gated_delta_ops,
    ("mlx_lm.models.ssm", "ssm_attn"): ssm_attn,
}


def _set(functions: MxFast) -> None:
    for name, function in functions._asdict().items():
        setattr(mx.fast, name, function)


def patch_mx_fast() -> None:
    """Replaces the entry points of mx.fast, and MLX's packing, in this process. Calling it again changes nothing."""
    _set(MxFast(rms_norm, layer_norm, rope, scaled_dot_product_attention))
    mx.quantize, mx.dequantize = quantize, dequantize


def restore_mx_fast() -> None:
    """Puts MLX's own entry points back: for tests that compare both in one process."""
    _set(PLAIN)
    mx.quantize, mx.dequantize = PLAIN_QUANTISATION


def patch_mlx_lm() -> None:
    """Replaces the functions of _MLX_LM in the graph modules that are loaded so far; call it after each load."""
    graphs = [module for name, module in sys.modules.items() if name.startswith("mlx_lm.models.")]
    for (module_name, name), ours in _MLX_LM.items():
        home = sys.modules.get(module_name)
        original = getattr(home, name, None)
        if original is None or original is ours:
            continue
        for module in graphs:
            if getattr(module, name, None) is original:
                setattr(module, name, ours)
