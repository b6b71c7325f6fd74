"""Attention over packed keys and values: what unpacking and plain attention give, bit for bit, and rings in a layer."""

from __future__ import annotations

from typing import Any

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import reference as ref
from tests.kernels.test_layer import DIM, HIDDEN, KV, arguments, one_layer

PACKINGS = [(8, 64), (8, 32), (4, 64), (4, 32)]


def packed(x: mx.array, bits: int, group: int) -> tuple[mx.array, mx.array, mx.array]:
    w, s, b = mx.quantize(x, group_size=group, bits=bits)
    return w, s, b


def attend(q: mx.array, keys: Any, values: Any, bits: int, group: int, **more: Any) -> mx.array:
    groups = [*keys[1:], *values[1:]]
    return kernels.attention(q, keys[0], values[0], scale=0.2, groups=groups, bits=bits, group=group, **more)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
def test_packed_keys_give_the_bits_of_unpacked_ones(isa: str, bits: int, group: int, dtype: mx.Dtype) -> None:
    """Many and few queries, ragged rows, windows and sinks; the buffer reaches further than what is seen."""
    k, v = (ref.normal(2, 2, 70, 64, seed=s, dtype=dtype) for s in (1, 2))
    keys, values = packed(k, bits, group), packed(v, bits, group)
    plain = [mx.dequantize(*p, group_size=group, bits=bits).astype(dtype) for p in (keys, values)]
    sinks = ref.normal(6, seed=5, dtype=dtype)
    for width in (1, 4, 9):
        q = ref.normal(2, 6, width, 64, dtype=dtype)
        for more in (
            {"start": mx.array([60 - width, 3])},
            {"start": mx.array([50, 0]), "window": 7, "sinks": sinks},
            {"mask": mx.arange(70) < 33},
        ):
            want = kernels.attention(q, *plain, scale=0.2, **more)
            assert mx.array_equal(attend(q, keys, values, bits, group, **more), want)


def test_packed_views_need_no_copy(isa: str) -> None:
    keys, values = (packed(ref.normal(3, 2, 40, 64, seed=s), 8, 64) for s in (1, 2))
    q = ref.normal(1, 4, 2, 64)
    views = [[part[1:2, :, :30] for part in parts] for parts in (keys, values)]
    copies = [[mx.contiguous(part) for part in parts] for parts in views]
    assert mx.array_equal(attend(q, *views, 8, 64), attend(q, *copies, 8, 64))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
def test_rows_are_packed_and_unpacked_as_mlx_does(isa: str, bits: int, group: int, dtype: mx.Dtype) -> None:
    """Also of constant groups, of negative ones and of strided input."""
    x = ref.normal(2, 5, 3, 128, dtype=dtype).transpose(0, 2, 1, 3)
    x[0, 0] = 0
    x[0, 1] = 2.5
    x[1] = -mx.abs(x[1])
    ours, want = kernels.pack_rows(x, bits=bits, group=group), packed(x, bits, group)
    for one, other in zip(ours, want, strict=True):
        assert mx.array_equal(one, other)
    for part in (slice(0, 5), slice(1, 4)):
        parts = [w[:, :, part] for w in want]
        back = kernels.unpack_rows(*parts, bits=bits, group=group)
        assert mx.array_equal(back, mx.dequantize(*parts, group_size=group, bits=bits))


def test_attention_over_rows_that_wait_to_be_unpacked_reads_them_packed() -> None:
    keys, values = (packed(ref.normal(1, 2, 300, 64, seed=s), 8, 64) for s in (1, 2))
    q = ref.normal(1, 4, 2, 64)
    lazy = [kernels.unpack_rows(*p, bits=8, group=64) for p in (keys, values)]
    ours = kernels.attention(q, *lazy, scale=0.2, causal=True)
    mx.eval(ours)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    again = kernels.attention(
        q, *[kernels.unpack_rows(*p, bits=8, group=64) for p in (keys, values)], scale=0.2
    )
    mx.eval(again)
    assert mx.get_peak_memory() - before < lazy[0].nbytes, "nothing was unpacked"
    mx.eval(lazy)
    assert mx.array_equal(ours, kernels.attention(q, *lazy, scale=0.2, causal=True))


def test_wrong_packings_are_errors() -> None:
    for bits, group in ((5, 64), (8, 48), (8, 128)):
        with pytest.raises(ValueError, match="pack_rows"):
            kernels.pack_rows(ref.normal(1, 1, 2, 64), bits=bits, group=group)
    with pytest.raises(ValueError, match="shapes do not match"):
        kernels.unpack_rows(*packed(ref.normal(1, 1, 2, 64), 8, 64), bits=8, group=32)

    q, keys = ref.normal(1, 4, 1, 64), packed(ref.normal(1, 2, 9, 64), 8, 64)
    for bits, group in ((4, 64), (8, 32), (5, 64), (8, 48)):
        with pytest.raises(ValueError, match="attention"):
            attend(q, keys, keys, bits, group)
    with pytest.raises(ValueError, match="scales and biases"):
        kernels.attention(q, keys[0], keys[0], scale=1.0, bits=8, group=64)


# ------------------------------------------------------------------ in a decoder layer
WIDE = 4 * DIM  # heads of 64, so that groups of 32 and 64 fit


def wide_arguments(dtype: mx.Dtype) -> dict[str, Any]:
    heads = 4
    pieces = [
        ref.normal(n * WIDE, HIDDEN, seed=i, dtype=dtype) / HIDDEN**0.5 for i, n in enumerate((heads, KV, KV))
    ]
    return {
        **arguments(dtype, False),
        "qkv": kernels.pack_dense(pieces)[0],
        "qkv_bias": None,
        "out": kernels.pack_dense([ref.normal(HIDDEN, heads * WIDE, seed=3, dtype=dtype) / 16])[0],
        "heads": heads,
        "head_dim": WIDE,
    }


def empty(dtype: mx.Dtype, bits: int, group: int, capacity: int = 48) -> list[mx.array]:
    """Keys, values, and scales and biases of both."""
    if not bits:
        return [mx.zeros((3, KV, capacity, WIDE), dtype)] * 2
    words = mx.zeros((3, KV, capacity, WIDE * bits // 32), mx.uint32)
    return [words] * 2 + [mx.zeros((3, KV, capacity, WIDE // group), dtype)] * 4


def run(layer: Any, x: mx.array, buffers: list[mx.array], start: Any, **more: Any) -> list[mx.array]:
    return one_layer(x, layer, *buffers[:2], mx.array(start), scales=buffers[2:], **more)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
def test_a_layer_packs_as_mlx_does(isa: str, threads: int, bits: int, group: int, dtype: mx.Dtype) -> None:
    """The packed rows are mx.quantize of the rows that a plain layer stores, and a row knows no neighbour."""
    layer = kernels.make_layer(**wide_arguments(dtype))
    x, counts = ref.normal(2, 9, HIDDEN, dtype=dtype), mx.array([9, 5])
    _, keys, values = run(layer, x, empty(dtype, 0, 0), [0, 0], count=counts, first_slot=1)
    _, *buffers = run(
        layer, x, empty(dtype, bits, group), [0, 0], count=counts, first_slot=1, bits=bits, group=group
    )
    want = [packed(part[1:, :, :9], bits, group) for part in (keys, values)]
    order = [want[0][0], want[1][0], *want[0][1:], *want[1][1:]]
    for ours, theirs in zip(buffers, order, strict=True):
        assert mx.array_equal(ours[1, :, :9], theirs[0])
        assert mx.array_equal(ours[2, :, :5], theirs[1, :, :5])
        assert not np.array((ours[0] != 0).any())
    step = ref.normal(2, 1, HIDDEN, seed=8, dtype=dtype)
    more: dict[str, Any] = {"bits": bits, "group": group}
    both, *_ = run(layer, step, buffers, [9, 5], first_slot=1, **more)
    for row in range(2):
        alone, *_ = run(layer, step[row : row + 1], buffers, [9 - 4 * row], first_slot=1 + row, **more)
        assert mx.array_equal(alone, both[row : row + 1])


def ring_mask(start: list[int], width: int, size: int, window: int) -> mx.array:
    queries = mx.array(start)[:, None] + mx.arange(width)[None]
    newest, slots = queries[:, -1:, None], mx.arange(size)[None, None]
    held = newest - ((newest - slots) % size)
    seen = (held >= 0) & (held <= queries[..., None]) & (held > queries[..., None] - window)
    return seen[:, None]


@pytest.mark.parametrize("bits", [0, 8])
def test_a_wrapped_ring_sees_what_a_long_row_sees(isa: str, threads: int, bits: int) -> None:
    """Within rounding: the ring sums its columns in another order."""
    layer = kernels.make_layer(**wide_arguments(mx.float32))
    size, window = 16, 10
    packing: dict[str, Any] = {"bits": bits, "group": 64} if bits else {}
    ring, whole, start = empty(mx.float32, bits, 64, size), empty(mx.float32, bits, 64), [0, 4]
    for step, width in enumerate((5, 1, 6, 1, 1, 7, 3)):
        x = ref.normal(2, width, HIDDEN, seed=step)
        mask = ring_mask(start, width, size, window)
        y, *ring = run(layer, x, ring, start, ring=size, mask=mask, **packing)
        want, *whole = run(layer, x, whole, start, window=window, **packing)
        assert float(mx.abs(y - want).max()) < 1e-5
        start = [n + width for n in start]
    assert max(start) > size


def test_limits_of_rings_and_packings_are_errors() -> None:
    layer, x = kernels.make_layer(**wide_arguments(mx.float32)), ref.normal(2, 3, HIDDEN)
    plain, eight = empty(mx.float32, 0, 0), empty(mx.float32, 8, 64)
    mask = mx.ones((2, 1, 3, 16), mx.bool_)
    for buffers, more in (
        (plain, {"ring": 16}),
        (plain, {"ring": 49, "mask": mx.ones((2, 1, 3, 49), mx.bool_)}),
        (plain, {"ring": 2, "mask": mask[..., :2]}),
        (plain, {"ring": 16, "mask": mask[:1]}),
        (plain, {"bits": 8, "group": 64}),
        (eight, {"bits": 4, "group": 64}),
        (eight, {"bits": 8, "group": 32}),
        (eight, {"bits": 8, "group": 48}),
        (eight, {}),
    ):
        with pytest.raises(ValueError, match="layer"):
            run(layer, x, buffers, [0, 0], **more)
