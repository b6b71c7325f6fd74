"""AMX, where the processor has it: the probe says so, the dispatch list agrees, its bits are those of the others."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import mantou_kernels as kernels
import mlx.core as mx
import pytest

from tests.kernels import reference as ref

NAMES = kernels.runnable_kernels()


def announced() -> bool:
    """Whether Linux says that this processor has AMX for integers."""
    info = Path("/proc/cpuinfo")
    flags = re.findall(r"^flags\s*:(.*)$", info.read_text(), re.MULTILINE)[:1] if info.exists() else []
    return any({"amx_tile", "amx_int8"} <= set(line.split()) for line in flags)


def test_the_list_of_runnable_kernels_says_what_the_probe_found() -> None:
    assert ("amx" in NAMES) == (kernels.amx() == "works"), kernels.amx()
    if announced():
        assert kernels.amx() != "absent"
    else:
        assert "amx" not in NAMES


def test_the_best_runnable_kernels_are_chosen() -> None:
    before = kernels.select_kernels()
    for name in NAMES:
        assert kernels.select_kernels(name) == name
    kernels.select_kernels(before)
    assert before == NAMES[0]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("k", [512, 1024])
def test_all_runnable_kernels_give_the_same_bits(bits: int, planes: int, k: int) -> None:
    before, found = kernels.select_kernels(), {}
    w, s, b = mx.quantize(ref.normal(80, k, seed=bits), group_size=64, bits=bits)
    (packed,) = kernels.pack_affine([w], [s], [b], group_size=64, bits=bits)
    x = ref.normal(70, k)
    try:
        for name in NAMES:
            kernels.select_kernels(name)
            found[name] = mx.concatenate(
                [kernels.linear(x[:m], packed, planes=planes) for m in (1, 7, 8, 9, 12, 15, 16, 31, 70)]
            )
            mx.eval(found[name])
    finally:
        kernels.select_kernels(before)
    assert list(found) == NAMES
    for one, other in itertools.pairwise(NAMES):
        assert mx.array_equal(found[one], found[other]), (one, other)
