"""The fused decoder layer: same bits as the separate steps, whatever else is in the batch, and checked limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import reference as ref

HIDDEN, HEADS, KV, DIM, INNER = 96, 6, 2, 16, 64


def packed(rows: int, k: int, seed: int, dtype: mx.Dtype) -> mx.array:
    return ref.normal(rows, k, seed=seed, dtype=dtype) / k**0.5


def arguments(dtype: mx.Dtype, gemma: bool) -> dict[str, Any]:
    wide = [packed(n * DIM, HIDDEN, i, dtype) for i, n in enumerate((HEADS, KV, KV))]
    pair = [packed(INNER, HIDDEN, 5 + i, dtype) for i in range(2)]
    some = {
        "attention_out_norm": ref.normal(HIDDEN, seed=11, dtype=dtype),
        "mlp_out_norm": ref.normal(HIDDEN, seed=12, dtype=dtype),
        "query_norm": ref.normal(DIM, seed=13, dtype=dtype),
        "key_norm": ref.normal(DIM, seed=14, dtype=dtype),
    }
    return {
        "qkv": kernels.pack_dense(wide)[0],
        "out": kernels.pack_dense([packed(HIDDEN, HEADS * DIM, 3, dtype)])[0],
        "gate_up": kernels.pack_dense(pair, interleave=True)[0],
        "down": kernels.pack_dense([packed(HIDDEN, INNER, 4, dtype)])[0],
        "input_norm": ref.normal(HIDDEN, seed=9, dtype=dtype),
        "mlp_norm": ref.normal(HIDDEN, seed=10, dtype=dtype),
        "qkv_bias": ref.normal((HEADS + 2 * KV) * DIM, seed=15, dtype=dtype),
        "eps": 1e-5,
        "heads": HEADS,
        "kv_heads": KV,
        "head_dim": DIM,
        "scale": 0.25,
        "rope_dims": 12,
        "rope_traditional": False,
        "rope_base": 1e4,
        "rope_periods": None,
        "rope_scale": 1.0,
        "rope_input_scale": 1.0,
        "gate": "silu",
        **(some if gemma else {}),
    }


def separate(
    a: dict[str, Any], x: mx.array, keys: mx.array, values: mx.array, start: mx.array, window: int
) -> Any:
    """The same layer, one primitive a step."""
    b, t, _ = x.shape
    qkv = kernels.linear(x, a["qkv"], norm=a["input_norm"], bias=a["qkv_bias"])
    q, k, v = mx.split(qkv.reshape(b, t, -1, DIM).transpose(0, 2, 1, 3), [HEADS, HEADS + KV], axis=1)
    if "query_norm" in a:
        q, k = kernels.rms_norm(q, a["query_norm"], 1e-5), kernels.rms_norm(k, a["key_norm"], 1e-5)
    way = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": start}
    q, k = kernels.rope(q, 12, **way), kernels.rope(k, 12, **way)
    keys, values = kernels.kv_write(keys, k, start), kernels.kv_write(values, v, start)
    mixed = kernels.attention(q, keys, values, scale=0.25, start=start, window=window)
    r = kernels.linear(mixed.transpose(0, 2, 1, 3).reshape(b, t, -1), a["out"])
    if "attention_out_norm" in a:
        r = kernels.rms_norm(r, a["attention_out_norm"], 1e-5)
    h = x + r
    r = kernels.linear(kernels.linear(h, a["gate_up"], norm=a["mlp_norm"], gate="silu"), a["down"])
    if "mlp_out_norm" in a:
        r = kernels.rms_norm(r, a["mlp_out_norm"], 1e-5)
    return h + r, keys, values


def one_layer(
    x: mx.array,
    layer: Any,
    keys: mx.array,
    values: mx.array,
    start: mx.array,
    scales: Sequence[mx.array] = (),
    **more: Any,
) -> list[mx.array]:
    """What the layer gives, and copies of the buffers with what it wrote."""
    buffers = [part * 1 for part in (keys, values, *scales)]
    y = kernels.layers(x, [layer], [buffers], start, **more)
    mx.eval(y)
    return [y, *buffers]


def empty(slots: int, dtype: mx.Dtype) -> mx.array:
    return mx.zeros((slots, KV, 32, DIM), dtype)


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_bits_of_the_separate_steps(isa: str, threads: int, dtype: mx.Dtype, gemma: bool) -> None:
    a = arguments(dtype, gemma)
    layer = kernels.make_layer(**a)
    for window in (0, 4):
        ours, theirs = [empty(2, dtype)] * 2, [empty(2, dtype)] * 2
        start = mx.array([0, 0])
        for step, width in enumerate((9, 1, 3)):
            x = ref.normal(2, width, HIDDEN, seed=step, dtype=dtype)
            y, *ours = one_layer(x, layer, *ours, start, window=window)
            want, *theirs = separate(a, x, *theirs, start, window)
            for got, expected in zip((y, *ours), (want, *theirs), strict=True):
                assert mx.array_equal(got, expected)
            start = start + width


def quantised(parts: list[mx.array], *, interleave: bool = False) -> Any:
    words, scales, biases = zip(*(mx.quantize(part, group_size=32, bits=4) for part in parts), strict=True)
    packed = kernels.pack_affine(
        list(words), list(scales), list(biases), group_size=32, bits=4, interleave=interleave
    )
    return packed[0]


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("form", ["dense", "affine"])
def test_a_long_prompt_has_the_bits_of_its_pieces(isa: str, threads: int, form: str, gemma: bool) -> None:
    a = arguments(mx.float32, gemma)
    if form == "affine":
        wide = [packed(n * DIM, HIDDEN, i, mx.float32) for i, n in enumerate((HEADS, KV, KV))]
        pair = [packed(INNER, HIDDEN, 5 + i, mx.float32) for i in range(2)]
        a |= {
            "qkv": quantised(wide),
            "out": quantised([packed(HIDDEN, HEADS * DIM, 3, mx.float32)]),
            "gate_up": quantised(pair, interleave=True),
            "down": quantised([packed(HIDDEN, INNER, 4, mx.float32)]),
        }
    layer, before, num_tokens = kernels.make_layer(**a), 5, 500
    x = ref.normal(1, num_tokens, HIDDEN)
    held = [ref.normal(1, KV, before + num_tokens, DIM, seed=seed) for seed in (1, 2)]
    for window in (0, 40):
        whole = one_layer(x, layer, *held, mx.array([before]), window=window)
        pieces, buffers = [], list(held)
        for first in range(0, num_tokens, 100):
            start = mx.array([before + first])
            y, *buffers = one_layer(x[:, first : first + 100], layer, *buffers, start, window=window)
            pieces.append(y)
        assert mx.array_equal(whole[0], mx.concatenate(pieces, axis=1))
        assert all(map(mx.array_equal, whole[1:], buffers))


def test_a_row_does_not_know_its_neighbours(isa: str, threads: int) -> None:
    layer = kernels.make_layer(**arguments(mx.float32, False))
    lengths, x = (7, 0, 4), ref.normal(3, 7, HIDDEN)
    keys, values = ref.normal(5, KV, 32, DIM, seed=1), ref.normal(5, KV, 32, DIM, seed=2)
    start, count = mx.array([3, 5, 0]), mx.array(lengths)
    y, new_keys, _ = one_layer(x, layer, keys, values, start, count=count, first_slot=1)
    for b, n in enumerate(lengths):
        slot, first = b + 1, int(start[b])
        changed = np.any(np.array(new_keys[slot]) != np.array(keys[slot]), axis=(0, 2))
        assert np.array_equal(np.flatnonzero(changed), np.arange(first, first + n))
        if n:
            alone, _, _ = one_layer(x[b : b + 1, :n], layer, keys, values, start[b : b + 1], first_slot=slot)
            assert mx.array_equal(alone, y[b : b + 1, :n])
    for slot in (0, 4):
        assert mx.array_equal(new_keys[slot], keys[slot])


def test_padding_takes_part_in_nothing_and_gives_zeros(isa: str, threads: int) -> None:
    for gemma in (False, True):
        layer = kernels.make_layer(**arguments(dtype=mx.float32, gemma=gemma))
        x, start, count = ref.normal(3, 5, HIDDEN), mx.array([2, 0, 9]), mx.array([1, 0, 4])
        real = mx.arange(5)[None, :, None] < count[:, None, None]
        y, *written = one_layer(mx.where(real, x, mx.nan), layer, *_buffers(3), start, count=count)
        want, *others = one_layer(x, layer, *_buffers(3), start, count=count)
        assert mx.array_equal(y, want) and all(map(mx.array_equal, written, others))
        assert not np.array(mx.where(real, 0, y)).any() and np.array(mx.where(real, y, 1)).all()


def _buffers(rows: int) -> list[mx.array]:
    return [ref.normal(rows, KV, 32, DIM, seed=seed) for seed in (1, 2)]


def test_buffers_are_written_in_place_and_views_of_them_keep_what_they_show() -> None:
    layer = kernels.make_layer(**arguments(mx.float32, False))
    x, keys, values = ref.normal(1, 1, HIDDEN), empty(1, mx.float32), empty(1, mx.float32)
    mx.eval(keys, values)

    def step(position: int) -> None:
        mx.eval(kernels.layers(x, [layer], [[keys, values]], mx.array([position])))

    def address(buffer: mx.array) -> int:
        return np.array(buffer, copy=False).ctypes.data

    where = address(keys)
    for position in range(3):
        step(position)
        assert address(keys) == where
        assert np.array(keys)[0, 0, :, 0].nonzero()[0].tolist() == list(range(position + 1))
    view, row = keys[:, :, :5], mx.swapaxes(values, 1, 2)
    mx.eval(view, row)
    shown = np.array(view), np.array(row)
    step(3)
    assert all(map(np.array_equal, (view, row), shown))
    assert address(keys) != where, "the view keeps the memory, the buffer moves"
    assert np.array(keys)[0, 0, :5, 0].nonzero()[0].tolist() == [0, 1, 2, 3]
    want = one_layer(x, layer, *[ref.normal(1, KV, 32, DIM, seed=seed) for seed in (1, 2)], mx.array([4]))
    turned = [mx.swapaxes(mx.swapaxes(part, 1, 2) * 1, 1, 2) for part in _buffers(1)]
    mx.eval(turned)  # of other strides
    y = kernels.layers(x, [layer], [turned], mx.array([4]))
    assert all(map(mx.array_equal, (y, *turned), want))


def test_layers_of_one_primitive_have_the_bits_of_layers_alone(isa: str, threads: int) -> None:
    both = [kernels.make_layer(**arguments(dtype=mx.float32, gemma=gemma)) for gemma in (False, True)]
    buffers = [[ref.normal(3, KV, 32, DIM, seed=2 * i + n) for n in range(2)] for i in range(3)]
    x, start, count = ref.normal(2, 3, HIDDEN), mx.array([4, 0]), mx.array([3, 1])
    where = {"count": count, "first_slot": 1, "window": 5}
    chosen = [both[0], both[1], both[0]]
    together = [[part * 1 for part in pair] for pair in buffers]
    y = kernels.layers(x, chosen, together, start, **where)
    mx.eval(y)
    for layer, (keys, values), pair in zip(chosen, buffers, together, strict=True):
        x, *alone = one_layer(x, layer, keys, values, start, **where)
        assert all(map(mx.array_equal, alone, pair))
    assert mx.array_equal(y, x)
    for wrong in ([], buffers[:2], [*buffers[:2], buffers[2][:1]]):
        with pytest.raises(ValueError, match="layer"):
            kernels.layers(x, chosen, wrong, start)


def test_limits_are_errors() -> None:
    good = arguments(mx.float32, False)
    for change in (
        {"heads": 5},
        {"head_dim": 8},
        {"rope_dims": 18},
        {"eps": 1e-5, "mlp_norm": ref.normal(HIDDEN + 1)},
        {"down": good["out"]},
        {"rope_periods": ref.normal(6)},
        {"gate": "relu"},
        {"planes": 0},
    ):
        with pytest.raises(ValueError, match="mantou_kernels"):
            kernels.make_layer(**{**good, **change})
    layer = kernels.make_layer(**good)
    keys = values = empty(2, mx.float32)
    x = ref.normal(2, 3, HIDDEN)
    for start, count in (
        ([0, 30], None),
        ([-1, 0], None),
        ([0, 0], [4, 0]),
        ([0, 0], [-1, 0]),
        ([0, 31], [0, 2]),
    ):
        counts = None if count is None else mx.array(count)
        with pytest.raises(RuntimeError, match="layer: row"):
            one_layer(x, layer, keys, values, mx.array(start), count=counts)
    for wrong in (x[..., :64], x[0], ref.normal(3, 3, HIDDEN)):
        with pytest.raises(ValueError, match="layer"):
            one_layer(wrong, layer, keys, values, mx.array([0, 0]))
