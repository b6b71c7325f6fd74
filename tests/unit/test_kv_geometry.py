from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.kv.batch import KVBatch
from mantou.kv.codecs import Native
from mantou.kv.geometry import Geometry
from mantou.kv.layouts import FullRows
from mantou.kv.plan import alike
from mantou.kv.recurrent import RecurrentState
from mantou.protocols import Group

PLAIN = settings(deadline=None, max_examples=60)

starts_of = st.lists(st.integers(0, 30), min_size=1, max_size=4)


def geometry(
    starts: list[int], width: int, counts: list[int] | None = None, **options: int | bool
) -> Geometry:
    group = Group(0, width, tuple(counts or [width] * len(starts)))
    return Geometry(group, starts, **options)


@PLAIN
@given(starts=starts_of, width=st.integers(1, 6), window=st.integers(0, 9))
def test_a_causal_mask_shows_earlier_positions_inside_the_window(
    starts: list[int], width: int, window: int
) -> None:
    found = geometry(starts, width)
    mask = np.array(found.causal_mask(found.end, window))
    assert mask.shape == (len(starts), 1, width, found.end)
    for row, start in enumerate(starts):
        for t in range(width):
            query = start + t
            expected = [c <= query and (not window or c > query - window) for c in range(found.end)]
            assert mask[row, 0, t].tolist() == expected


@PLAIN
@given(starts=starts_of, width=st.integers(1, 5), window=st.integers(1, 9), slack=st.integers(4, 9))
def test_a_ring_mask_shows_the_window_in_the_slots_that_hold_it(
    starts: list[int], width: int, window: int, slack: int
) -> None:
    size = window + slack
    mask = np.array(geometry(starts, width).ring_mask(size, window))
    for row, start in enumerate(starts):
        held: dict[int, int] = {}  # slot -> the position that was written last
        for position in range(start + width):
            held[position % size] = position
        for t in range(width):
            query = start + t
            expected = [
                slot in held and query - window < held[slot] <= query and held[slot] >= 0
                for slot in range(size)
            ]
            assert mask[row, 0, t].tolist() == expected
            assert sum(expected) == min(window, query + 1), "all of the window is there"


@PLAIN
@given(data=st.data(), starts=starts_of, width=st.integers(1, 6))
def test_rows_are_uniform_only_if_one_slice_holds_them_all(
    data: st.DataObject, starts: list[int], width: int
) -> None:
    counts = [data.draw(st.integers(0, width)) for _ in starts]
    found = geometry(starts, width, counts)
    active = [start for start, count in zip(starts, counts, strict=True) if count]
    if found.uniform and active:
        assert set(active) == {found.longest}
        assert max(starts) == found.longest, "an idle row must not be overwritten by the slice"
    assert found.end == max(active, default=0) + width
    if any(count < width for count in counts):
        assert found.lengths is not None
        assert found.lengths.tolist() == counts
    else:
        assert found.lengths is None
    assert found.positions.tolist() == [list(range(start, start + width)) for start in starts]


def test_offsets_are_an_int_for_graphs_that_need_one_and_for_single_rows() -> None:
    assert geometry([4, 4], 1, array_offsets=False).offset == 4
    assert geometry([4], 3).offset == 4
    several = geometry([4, 9], 1).offset
    assert not isinstance(several, int)
    assert several.tolist() == [4, 9]


def test_a_mask_has_one_plane_a_row_in_front_of_the_axes_a_graph_wants() -> None:
    four, five = geometry([0, 3], 2), geometry([0, 3], 2, mask_axes=5)
    assert five.causal_mask(5, 0).shape == (2, 1, 1, 2, 5)
    assert five.causal_mask(5, 0).squeeze().tolist() == four.causal_mask(5, 0).squeeze().tolist()


def test_every_mask_is_built_once_a_step() -> None:
    found = geometry([0, 3], 2)
    assert found.causal_mask(5, 0) is found.causal_mask(5, 0)
    assert found.causal_mask(5, 2) is not found.causal_mask(5, 0)
    assert found.ring_mask(8, 4) is found.ring_mask(8, 4)


# ------------------------------------------------------------------ bounds
@pytest.fixture
def batch() -> KVBatch:
    made = KVBatch(lambda num_slots: [FullRows(alike(Native()), num_slots), RecurrentState(1, num_slots)])
    made.resize(2)
    return made


@pytest.mark.parametrize(
    "group", [Group(1, 1, (1, 1)), Group(2, 1, (1,)), Group(0, 1, (2,)), Group(0, 1, (1,) * 3)]
)
def test_a_group_beyond_the_slots_or_its_width_is_refused(group: Group, batch: KVBatch) -> None:
    with pytest.raises(ValueError, match="does not fit 2 slots"):
        batch.begin(group)


@pytest.mark.parametrize("kept", [(2, 0), (1, 3), (-1, 0)])
def test_a_forward_cannot_keep_more_than_it_fed(kept: tuple[int, int], batch: KVBatch) -> None:
    group = Group(0, 2, (1, 2))
    batch.begin(group)
    with pytest.raises(ValueError, match="cannot keep"):
        batch.commit(group, kept)
    assert batch.lengths == [0, 0]
