"""Runs every CPU primitive on small inputs and compares it with plain MLX. Run once, before kernels are trusted.

C++ objects cross the border between two separately built libraries here: a wrong MLX shows as wrong numbers or worse,
so nothing is installed before this has passed. It takes some tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from mantou.models.ops.extension import kernels
from mantou.models.ops.fast import PLAIN, MxFast

# Largest error over largest value. 16-bit activations give 3e-5; 8-bit ones 1e-2; f32 arithmetic 1e-6.
_EXACT, _QUANTISED, _INT8 = 5e-6, 1e-4, 3e-2


def _normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed + sum(shape)))


def _error(ours: mx.array, theirs: mx.array) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    scale = mx.maximum(mx.max(mx.abs(theirs)), 1e-30)
    return float(mx.max(mx.abs(ours - theirs)) / scale)


Case = tuple[str, float, Callable[[], tuple[mx.array, mx.array]]]


def _linear_cases() -> Iterator[Case]:
    x, ids = _normal(3, 256), mx.arange(3, dtype=mx.int32)
    for bits in (2, 3, 4, 5, 6, 8):
        packed = mx.quantize(_normal(40, 256, seed=bits), group_size=64, bits=bits)
        (weights,) = kernels.pack_affine(*[[p] for p in packed], group_size=64, bits=bits)

        def plain(packed: Any = packed, bits: int = bits) -> mx.array:
            return mx.quantized_matmul(x, *packed, group_size=64, bits=bits)

        def rows(packed: Any = packed, bits: int = bits) -> mx.array:
            return mx.dequantize(*[p[:3] for p in packed], group_size=64, bits=bits)

        yield f"linear {bits} bits", _QUANTISED, lambda w=weights, p=plain: (kernels.linear(x, w), p())
        yield (
            f"linear {bits} bits int8",
            _INT8,
            lambda w=weights, p=plain: (kernels.linear(x, w, planes=1), p()),
        )
        yield f"embed {bits} bits", 0.0, lambda w=weights, r=rows: (kernels.embed(ids, w, mx.float32), r())
    dense = _normal(40, 256, seed=9)
    (weights,) = kernels.pack_dense([dense])
    yield "linear dense", _EXACT, lambda: (kernels.linear(x, weights), x @ dense.T)


def _expert_cases() -> Iterator[Case]:
    x, stack = _normal(4, 64), _normal(3, 32, 64, seed=1)
    (weights,) = kernels.pack_dense([stack])
    source, expert = mx.array([0, 3, 1, 2, 2]), mx.array([2, 0, 1, 1, 2])
    want = (x[source][:, None] @ stack[expert].swapaxes(-1, -2)).squeeze(1)
    yield "experts", _EXACT, lambda: (kernels.gather_linear(x, weights, source, expert), want)
    head = _normal(100, 64, seed=2)
    (packed,) = kernels.pack_dense([head])
    order = mx.argsort(-(x @ head.T), axis=-1)[:, :5].astype(mx.int32)
    yield "head top", 0.0, lambda: (kernels.linear_top(x, packed, 5)[1], order)
    a, b, slot = _normal(2, 4, 64, seed=3), _normal(2, 32, 4, seed=4), mx.array([0, -1, 1, 0])
    base, scale = _normal(4, 32, seed=5), mx.array([0.5, 2.0])
    low = mx.einsum("mk,mrk->mr", x, a[mx.maximum(slot, 0)])
    delta = mx.einsum("mr,mnr->mn", low, b[mx.maximum(slot, 0)]) * scale[mx.maximum(slot, 0)][:, None]
    adapted = base + mx.where(slot[:, None] >= 0, delta, 0.0)
    yield "adapters", _EXACT, lambda: (kernels.adapter_rows(base, x, a, b, scale, slot), adapted)


def _row_cases(plain: MxFast) -> Iterator[Case]:
    x, weight, bias = _normal(5, 72), _normal(72, seed=1), _normal(72, seed=2)
    yield "rms_norm", _EXACT, lambda: (kernels.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    yield (
        "layer_norm",
        _EXACT,
        lambda: (kernels.layer_norm(x, weight, bias, 1e-5), plain.layer_norm(x, weight, bias, 1e-5)),
    )
    g, u = _normal(3, 70, seed=3), _normal(3, 70, seed=4)
    # Written out: nn.silu and its kin are compiled functions, and compiling takes longer than the whole test.
    cubic = 0.7978845608 * (g + 0.044715 * g * g * g)
    gates = {
        "silu": g * mx.sigmoid(g),
        "gelu_tanh": 0.5 * g * (1 + mx.tanh(cubic)),
        "gelu_erf": 0.5 * g * (1 + mx.erf(g * 0.7071067812)),
    }
    for kind, gated in gates.items():
        yield f"gate {kind}", _EXACT, lambda k=kind, y=gated: (kernels.gate(k, g, u), y * u)
    heads, offset = _normal(2, 3, 4, 40, seed=5), mx.array([7, 300])
    periods = 10000.0 ** (mx.arange(16) / 16)
    for traditional in (False, True):
        for frequencies in ({"base": 10000.0}, {"base": None, "freqs": periods}):
            arguments = {"traditional": traditional, "scale": 0.5, "offset": offset, **frequencies}
            yield (
                "rope",
                _EXACT,
                lambda a=arguments: (kernels.rope(heads, 32, **a), plain.rope(heads, 32, **a)),
            )


def _attention_cases(plain: MxFast) -> Iterator[Case]:
    q = _normal(2, 5, 6, 40).transpose(0, 2, 1, 3)
    k, v = _normal(2, 2, 64, 40, seed=1)[:, :, :37], _normal(2, 2, 64, 40, seed=2)[:, :, :37]
    allowed = (mx.random.uniform(shape=(2, 1, 5, 37), key=mx.random.key(3)) > 0.3) | (mx.arange(37) == 0)
    sinks = _normal(6, seed=4)
    additive: dict[str, Any] = {"mask": mx.where(allowed, 0.0, -1e9), "sinks": sinks}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"causal": True}, {"mask": "causal"}),
        ({"mask": allowed}, {"mask": allowed}),
        (additive, additive),
    ]
    for ours, theirs in ways:
        yield (
            "attention",
            _EXACT,
            lambda o=ours, t=theirs: (
                kernels.attention(q, k, v, scale=0.16, **o),
                plain.scaled_dot_product_attention(q, k, v, scale=0.16, **t),
            ),
        )
    buffer, rows = _normal(2, 2, 16, 40, seed=5), _normal(2, 2, 3, 40, seed=6)
    index = mx.broadcast_to((mx.array([4, 9])[:, None] + mx.arange(3))[:, None, :, None], rows.shape)
    want = mx.put_along_axis(buffer, index, rows, axis=2)
    yield "kv_write", 0.0, lambda: (kernels.kv_write(buffer, rows, mx.array([4, 9])), want)
    # In blocks of 16 columns: slot 0 is block 1, slot 1 block 0.
    pool, table = mx.concatenate([buffer[1:], buffer[:1]], axis=2), mx.array([[1], [0]], mx.int32)
    paged = mx.concatenate([want[1:], want[:1]], axis=2)
    where = {"table": table, "block": 16}
    yield "kv_write in blocks", 0.0, lambda: (kernels.kv_write(pool, rows, mx.array([4, 9]), **where), paged)
    yield (
        "attention in blocks",
        0.0,
        lambda: (
            kernels.attention(rows, paged, paged, scale=0.16, columns=16, **where),
            kernels.attention(rows, want, want, scale=0.16),
        ),
    )


def _encoder_cases() -> Iterator[Case]:
    width, inner, heads, tokens = 32, 48, 2, 21
    x = _normal(3, tokens, width)
    scales = {"qkv": (3 * width, width), "out": (width, width), "up": (inner, width), "down": (width, inner)}
    products = {name: _normal(*shape, seed=i) * 0.2 for i, (name, shape) in enumerate(scales.items())}
    biases = {
        name: _normal(product.shape[0], seed=9 + i) for i, (name, product) in enumerate(products.items())
    }
    norm = [_normal(width, seed=20 + i) for i in range(4)]

    def normed(y: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        y = y - y.mean(axis=-1, keepdims=True)
        return y * mx.rsqrt((y * y).mean(axis=-1, keepdims=True) + 1e-5) * weight + bias

    def plain() -> mx.array:
        y, scale = x, (width // heads) ** -0.5
        for _ in range(2):
            qkv = (y @ products["qkv"].T + biases["qkv"]).reshape(3, tokens, 3, heads, width // heads)
            q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
            seen = (mx.softmax(scale * (q @ k.swapaxes(-1, -2)), axis=-1) @ v).swapaxes(1, 2).flatten(2)
            h = normed(y + seen @ products["out"].T + biases["out"], *norm[:2])
            up = h @ products["up"].T + biases["up"]
            up = 0.5 * up * (1 + mx.erf(up * 0.7071067812))
            y = normed(h + up @ products["down"].T + biases["down"], *norm[2:])
        return y

    layer = kernels.make_encoder_layer(
        **{name: kernels.pack_dense([product])[0] for name, product in products.items()},
        **{f"{name}_bias": bias for name, bias in biases.items()},
        attention_norm=norm[0],
        attention_norm_bias=norm[1],
        norm=norm[2],
        norm_bias=norm[3],
        eps=1e-5,
        heads=heads,
        scale=(width // heads) ** -0.5,
        activation="gelu_erf",
    )
    yield "encoder", _EXACT, lambda: (kernels.encoder(x, [layer, layer]), plain())
    lengths = mx.array([21, 4, 13])
    inside = (mx.arange(tokens) < lengths[:, None])[..., None]

    def alone() -> mx.array:
        rows = [kernels.encoder(x[b : b + 1, :n], [layer]) for b, n in enumerate((21, 4, 13))]
        return mx.concatenate([mx.pad(row, [(0, 0), (0, tokens - row.shape[1]), (0, 0)]) for row in rows])

    yield "encoder of rows", 0.0, lambda: (mx.where(inside, kernels.encoder(x, [layer], lengths), 0), alone())


def _scan_cases() -> Iterator[Case]:
    q, k, v = _normal(2, 3, 2, 32), _normal(2, 3, 2, 32, seed=1), _normal(2, 3, 4, 8, seed=2)
    g, beta = mx.sigmoid(_normal(2, 3, 4, seed=3)), mx.sigmoid(_normal(2, 3, 4, seed=4))
    start = _normal(2, 4, 8, 32, seed=5)

    def delta_steps() -> mx.array:
        state, keys, queries = start, mx.repeat(k, 2, -2), mx.repeat(q, 2, -2)
        for t in range(3):
            state = state * g[:, t, :, None, None]
            seen = (state * keys[:, t, :, None]).sum(-1)
            state = state + ((v[:, t] - seen) * beta[:, t, :, None])[..., None] * keys[:, t, :, None]
        return mx.concatenate([(state * queries[:, 2, :, None]).sum(-1).flatten(), state.flatten()])

    def delta_kernel() -> mx.array:
        y, state = kernels.gated_delta(q, k, v, g, beta, start)
        return mx.concatenate([y[:, 2].flatten(), state.flatten()])

    yield "gated_delta", _EXACT, lambda: (delta_kernel(), delta_steps())
    x, b, c = _normal(2, 3, 4, 8, seed=6), _normal(2, 3, 2, 16, seed=7), _normal(2, 3, 2, 16, seed=8)
    a_log, d, dt = _normal(4, seed=9), _normal(4, seed=10), mx.sigmoid(_normal(2, 3, 4, seed=11))
    first = _normal(2, 4, 8, 16, seed=12)

    def ssm_steps() -> mx.array:
        state = first
        for t in range(3):
            decay = mx.exp(-mx.exp(a_log) * dt[:, t])[..., None, None]
            inputs = (dt[:, t, :, None] * x[:, t])[..., None] * mx.repeat(b[:, t], 2, 1)[:, :, None]
            state = state * decay + inputs
        y = (state * mx.repeat(c[:, 2], 2, 1)[:, :, None]).sum(-1) + x[:, 2] * d[:, None]
        return mx.concatenate([y.flatten(), state.flatten()])

    def ssm_kernel() -> mx.array:
        y, state = kernels.ssm(x, a_log, b, c, d, dt, first)
        return mx.concatenate([y[:, 2].flatten(), state.flatten()])

    yield "ssm", _EXACT, lambda: (ssm_kernel(), ssm_steps())


def _draw_cases() -> Iterator[Case]:
    if not kernels.draws_like_mlx:
        return
    logits = _normal(2, 1, 3000) * 5
    row, off = mx.zeros((2, 1, 1)), mx.full((2, 1, 1), 1 << 30, dtype=mx.int32)
    tokens, scores, logprobs, best, _ = kernels.draw(
        logits,
        sampled=row > 0,
        inverse_temperature=row + 1,
        top_p=row + 1,
        top_k=off,
        min_p_log=row - mx.inf,
        seed_words=mx.zeros((2, 2), mx.uint32),
        positions=mx.zeros((2, 1), mx.uint32),
        num_top=3,
        count=mx.array([1, 1], dtype=mx.int32),
    )
    order = mx.argsort(-logits, axis=-1)[..., :3].astype(mx.int32)
    highest = logits.max(axis=-1) - mx.logsumexp(logits, axis=-1)
    yield "draw", 0.0, lambda: (mx.concatenate([tokens[..., None], best], axis=-1), order[..., [0, 0, 1, 2]])
    yield "log-probabilities", 0.0, lambda: (logprobs, highest)
    yield "logits of draws", 0.0, lambda: (scores, logits.max(axis=-1))


def self_test(plain: MxFast = PLAIN) -> str | None:
    """None when every primitive agrees with plain MLX, else one clause that names the first which does not."""
    cases = [*_linear_cases(), *_expert_cases(), *_row_cases(plain), *_attention_cases(plain), *_scan_cases()]
    cases.extend([*_encoder_cases(), *_draw_cases()])
    for name, limit, run in cases:
        ours, theirs = run()
        error = _error(ours, theirs)
        if not error <= limit:
            return f"{name} is off by {error:.1e}"
    return None
