"""Columns leave the device and come back as they were, whatever their dtype and however they are cut."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mantou.kv.pieces import CopiedRow, Packing, Parts, Piece, Unpacking, host_views, to_host

DTYPES = [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8]
NUM_COLUMNS = 300


def layers(dtype: mx.Dtype) -> list[Parts]:
    """Two slots of three layers; one layer has other shapes, as a packed one has."""
    shapes = [((2, 3, NUM_COLUMNS, 8), (2, 3, NUM_COLUMNS, 8))] * 2 + [((2, 1, NUM_COLUMNS, 4),) * 2]
    keys = mx.random.split(mx.random.key(1), 6)
    made = [mx.random.randint(0, 200, shape, key=keys[i]) for i, shape in enumerate(sum(shapes, ()))]
    arrays = [array.astype(dtype) for array in made]
    mx.eval(arrays)
    return [(arrays[i], arrays[i + 1]) for i in (0, 2, 4)]


def cut(found: Sequence[Parts], lo: int, hi: int) -> list[Parts]:
    return [tuple(part[1:2, :, lo:hi] for part in parts) for parts in found]


def raw(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_in_parts_is_the_copy_in_one_go(dtype: mx.Dtype) -> None:
    found = cut(layers(dtype), 17, 270)
    packing = Packing(found)
    for index, parts in enumerate(found):
        packing.take(index, tuple((view,) for view in host_views(parts)))
    whole = to_host(found)
    assert [(s.dtype, s.members) for s in packing.stacks] == [(s.dtype, s.members) for s in whole]
    for one, other in zip(packing.stacks, whole, strict=True):
        assert one.data.dtype == other.data.dtype and np.array_equal(one.data, other.data)
        assert one.data.flags.c_contiguous and one.data.flags.owndata, "a view would keep the buffer alive"


@pytest.mark.parametrize("ends", [(300,), (256, 300), (10, 11, 200, 300)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_come_back_joined_with_zeros_behind_them(dtype: mx.Dtype, ends: tuple[int, ...]) -> None:
    found = layers(dtype)
    starts = (0, *ends[:-1])
    pieces = [Piece(lo, hi, to_host(cut(found, lo, hi))) for lo, hi in zip(starts, ends, strict=True)]
    unpacking = Unpacking(pieces)
    for index, parts in enumerate(found):
        for back, part in zip(unpacking.columns(index, 320), parts, strict=True):
            assert back.dtype == dtype and back.shape[2] == 320
            assert np.array_equal(raw(back[:, :, :300]), raw(part[1:2]))
            assert not raw(back[:, :, 300:]).any()


def test_a_copied_row_gives_what_was_copied_and_says_what_else_was_asked_for() -> None:
    found = layers(mx.float32)
    row = CopiedRow(Piece(17, 270, to_host(cut(found, 17, 270))))
    assert row.columns(17, 270) is row.piece
    inner = row.columns(20, 256)
    assert (inner.lo, inner.hi, row.lacking) == (20, 256, None)
    assert np.array_equal(inner.stacks[0].data, row.piece.stacks[0].data[..., 3:239, :])
    assert inner.stacks[0].data.flags.owndata, "a view would keep the whole piece alive"
    for lo, hi, lacking in ((256, 271, 256), (0, 17, 0), (5, 300, 0)):
        assert row.columns(lo, hi) == Piece(hi, hi, ())
        assert row.lacking == lacking


def test_the_buffers_have_one_owner_after_a_copy() -> None:
    """Or the next write of a token would copy them."""
    buffer = mx.zeros((2, 3, NUM_COLUMNS, 8))
    mx.eval(buffer)
    place = np.array(buffer, copy=False).ctypes.data
    stacks = to_host([(buffer[1:2, :, :256],)])
    packing = Packing([(buffer[:1, :, :9],)])
    [view] = host_views([buffer])
    packing.take(0, ((view[:1, :, :4], view[:1, :, 4:9]),))
    del view
    buffer[1:2, :, 256:257] = mx.ones((1, 3, 1, 8))
    mx.eval(buffer)
    assert np.array(buffer, copy=False).ctypes.data == place
    assert not stacks[0].data.any() and not packing.stacks[0].data.any()
