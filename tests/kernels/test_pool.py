"""The thread pool under many small jobs, and its thread counts."""

from __future__ import annotations

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import reference as ref


@pytest.mark.parametrize("count", [2, 3, 8])
def test_short_jobs_that_follow_each_other(count: int) -> None:
    """A helper that wakes late must not touch the next job: more threads than cores make late helpers common."""
    before = kernels.threads()
    weights = [kernels.pack_dense([ref.normal(rows, 128, seed=rows)])[0] for rows in (256, 1600, 48, 4096)]
    x = ref.normal(3, 128)
    kernels.set_threads(1)
    want = [np.array(kernels.linear(x, w)) for w in weights]
    kernels.set_threads(count)
    for _ in range(150):
        results = [kernels.linear(x, w) for w in weights]
        mx.eval(results)
        for got, expected in zip(results, want, strict=True):
            assert np.array_equal(np.array(got), expected)
    kernels.set_threads(before)


def test_counts() -> None:
    before = kernels.threads()
    assert kernels.usable_cpus() >= 1
    for asked, got in ((1, 1), (3, 3), (0, 1), (-5, 1), (10**6, 256), (2, 2)):
        kernels.set_threads(asked)
        assert kernels.threads() == got
    kernels.set_threads(before)
