"""Counters and histograms of one server as plain numbers. Knows no exposition format, no HTTP and no engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# Seconds. Decode on a CPU and on an H200 lie three orders of magnitude apart, so the buckets span both.
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_INTER_TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_END_TO_END_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Histogram:
    """Counts of observations per bucket. `counts[i]` holds values <= `bounds[i]`; the last one holds the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations at or below it) for every bucket; the last bound is infinity."""
        rows: list[tuple[float, int]] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


@dataclass(slots=True)
class ServerMetrics:
    """What the HTTP layer measures. One thread (the event loop's) writes it; all times are seconds."""

    first_token_s: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(_INTER_TOKEN_S))
    end_to_end_s: Histogram = field(default_factory=lambda: Histogram(_END_TO_END_S))
    finished: Counter[str] = field(default_factory=Counter[str])  # stop | length | abort | error -> sequences
    rejected: Counter[str] = field(
        default_factory=Counter[str]
    )  # error code -> requests refused before they ran
