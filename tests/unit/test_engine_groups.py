"""Which rows share a forward: decided by slots and numbers of tokens alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mantou.data import Request, Sampling
from mantou.engine.groups import Grouping
from mantou.engine.pacing import Pacer
from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from tests.compose.harness import Case, make_step, requests, run

EXACT = Grouping(Shapes(bucketed=False), 512, ragged_offsets=True, ragged_widths=True)


def prompt(slot: int, num_tokens: int) -> Sequence:
    return Sequence(Request(f"r{slot}", tuple(range(num_tokens)), Sampling()), 8, slot=slot)


def slots(grouping: Grouping, *chunks: tuple[Sequence, int]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(group.lo, group.width, group.num_tokens) for group, _ in grouping.prompts(chunks)]


def test_prompts_of_like_lengths_go_together_whatever_their_order() -> None:
    rows = [prompt(2, 9), prompt(0, 10), prompt(1, 12)]
    assert slots(EXACT, *((row, row.num_pending) for row in rows)) == [(0, 12, (10, 12, 9))]


def test_a_prompt_that_would_pad_the_others_goes_alone() -> None:
    rows = [prompt(0, 10), prompt(1, 200), prompt(2, 9)]
    assert slots(EXACT, *((row, row.num_pending) for row in rows)) == [
        (0, 10, (10,)),
        (1, 200, (200,)),
        (2, 9, (9,)),
    ]


def test_a_chunk_that_ends_no_prompt_goes_alone_because_nothing_is_drawn_for_it() -> None:
    assert slots(EXACT, (prompt(0, 10), 10), (prompt(1, 40), 12)) == [(0, 10, (10,)), (1, 12, (12,))]
    assert slots(EXACT, (prompt(0, 40), 12), (prompt(1, 10), 10)) == [(0, 12, (12,)), (1, 10, (10,))]


def test_rows_that_are_no_neighbours_go_alone() -> None:
    assert slots(EXACT, (prompt(0, 10), 10), (prompt(2, 10), 10)) == [(0, 10, (10,)), (2, 10, (10,))]


def test_graphs_that_cannot_mix_rows_get_one_at_a_time() -> None:
    for kind in ("ragged_offsets", "ragged_widths"):
        assert len(slots(replace(EXACT, **{kind: False}), (prompt(0, 9), 9), (prompt(1, 9), 9))) == 2


def test_where_bits_depend_on_the_shape_every_prompt_keeps_its_own() -> None:
    grouping = replace(EXACT, shapes=Shapes(bucketed=True))
    assert slots(grouping, (prompt(0, 9), 9), (prompt(1, 9), 9)) == [(0, 16, (9,)), (1, 16, (9,))]


def test_prompts_that_arrive_together_share_forwards_and_keep_their_tokens() -> None:
    case, wanted = Case("llama", rows=6), [replace(r, prompt=r.prompt[-9:]) for r in requests(Sampling())]
    alone = [run(case, [request]).tokens[request.id] for request in wanted]
    step = make_step(case)
    groups: list[int] = []
    forward = step.runner.forward
    step.runner.forward = lambda group, *more, **kinds: (  # type: ignore[method-assign]
        groups.append(len(group.num_tokens)) if group.width > 1 else None,
        forward(group, *more, **kinds),
    )[1]
    for request in wanted:
        step.submit(request)
    while step.busy:
        step.advance()
    tokens: dict[str, list[int]] = {}
    for event in step.take_events():
        tokens.setdefault(event.request_id, []).extend(event.tokens)
    assert [tokens[request.id] for request in wanted] == alone
    assert max(groups) > 1


def test_prompts_that_find_no_row_make_no_running_row_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than rows get more of a step, but only those that are read in it."""
    asked, chunk = [], Pacer.chunk

    def counted(self: Pacer, num_decoding: int, num_prompts: int = 1) -> int:
        asked.append((num_decoding, num_prompts))
        return chunk(self, num_decoding, num_prompts)

    monkeypatch.setattr(Pacer, "chunk", counted)
    run(Case("llama", rows=2), requests(Sampling(), 12))
    assert max(prompts for _, prompts in asked) == 2
    assert (1, 1) in asked and all(rows + prompts <= 2 for rows, prompts in asked)
