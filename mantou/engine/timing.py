"""How long the last steps took, and how much of each went to the prefix store. Knows no rows and no device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

SIZE = 4096


class StepTimes:
    """A ring of the last SIZE steps. The model thread writes; any thread may call `summary`."""

    def __init__(self) -> None:
        self._steps = np.zeros((SIZE, 2))  # seconds: of the whole step, of the prefix store's part in it
        self._count = 0
        self._store_s = 0.0
        self._entered: float | None = None

    @contextmanager
    def store(self) -> Generator[None]:
        """Time in here is the prefix store's."""
        self._entered = perf_counter()
        try:
            yield
        finally:
            self._store_s += perf_counter() - self._entered
            self._entered = None

    @property
    def store_s(self) -> float:
        """The prefix store's time in this step so far."""
        return self._store_s + (0.0 if self._entered is None else perf_counter() - self._entered)

    def end(self, seconds: float) -> float:
        """A step is over. Returns what is left of it without the store's part."""
        self._steps[self._count % SIZE] = seconds, self._store_s
        self._count += 1
        left = seconds - self._store_s
        self._store_s = 0.0
        return left

    def last(self, num_steps: int = SIZE) -> np.ndarray:
        """[n, 2] of at most the last `num_steps` steps, in order: seconds, and the store's seconds among them."""
        count = self._count
        order = np.arange(max(count - min(num_steps, SIZE), 0), count) % SIZE
        return self._steps[order]

    def summary(self) -> dict[str, Any]:
        """Of the steps in the ring. `store_max_ratio`: the store's longest part over the median step."""
        steps = self.last()
        if not len(steps):
            return {"count": 0}
        whole, store = steps[:, 0], steps[:, 1]
        median = float(np.median(whole))
        return {
            "count": len(steps),
            "median_s": median,
            "p99_s": float(np.quantile(whole, 0.99)),
            "max_s": float(whole.max()),
            "store_mean_s": float(store.mean()),
            "store_max_s": float(store.max()),
            "store_max_ratio": float(store.max()) / median if median else None,
        }
