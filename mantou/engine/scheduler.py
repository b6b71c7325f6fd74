"""Who runs this step, and how much. Pure: it sees lengths and returns a plan; what lengths fit memory it is told.

Fairness, by construction: every decoding row gets its token in every step, and all prompt work of a step together is at
most one chunk. So a running row waits at most one chunk between two tokens, and a waiting prompt gets a whole chunk in
every step. The pacer sizes the chunk so that it takes about as long as a decode step, so each side has about half of
the time; where more prompts wait than rows decode, they get as much more, up to eight decode steps: a burst of requests
is answered sooner as a whole. It never goes below 16 tokens, and where a decode step is shorter than those, prompts get
more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mantou.protocols import Load, Plan


class FairScheduler:
    """First come, first served; at most `max_rows` rows run, and only rows whose greatest lengths fit together."""

    def __init__(self, max_rows: int, fits: Callable[[Sequence[int]], bool] = lambda lengths: True) -> None:
        self.max_rows = max_rows
        self._fits = fits

    def plan(self, waiting: Sequence[Load], running: Sequence[Load], chunk: int) -> Plan:
        """Loads are given in order of arrival. A row with no token left to generate is not run."""
        num_tokens: dict[str, int] = {}
        room = chunk
        for load in running:
            if load.num_pending == 1:
                if load.num_left > 0:
                    num_tokens[load.id] = 1
            elif room > 0:
                num_tokens[load.id] = min(load.num_pending, room)
                room -= num_tokens[load.id]
        admit: list[str] = []
        lengths = [load.num_most for load in running]
        for load in waiting[: max(self.max_rows - len(running), 0)]:
            lengths.append(load.num_most)
            if room <= 0 or not self._fits(lengths):
                break
            admit.append(load.id)
            num_tokens[load.id] = min(load.num_pending, room)
            room -= num_tokens[load.id]
        return Plan(tuple(admit), num_tokens)
