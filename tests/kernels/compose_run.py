"""The composition matrix with the CPU kernels on, in a process of its own: they replace mx.fast for the whole process.

Prints one line a cell that differs, then `N cells, M differences`.
"""

from __future__ import annotations

import sys
from functools import partial

from mantou.models.load import describe
from mantou.models.ops.cpu import CpuOps
from mantou.models.runner import Runner
from mantou.sampling.sampler import DeviceSampler
from tests.compose import harness
from tests.compose.axes import AXES, MIXED, combinations
from tests.compose.drafts import make_provider
from tests.compose.families import FAMILIES, tiny
from tests.compose.harness import Case, requests, run
from tests.fakes import DictStore

ARRIVALS = {"r1": 2, "r2": 3, "r3": 9, "r4": 11, "r5": 11}


def with_kernels(family: str) -> None:
    """Puts the model with the kernels installed where the harness looks for it."""
    module = tiny(family)
    ops = CpuOps()
    notes = ops.install(module)
    print(family, *notes, flush=True)
    loaded = describe(module, FAMILIES[family], harness.capabilities(family))
    harness.model = lambda name, seed=0: loaded
    harness.Runner = partial(Runner, write_rows=ops.write_rows, read_blocks=ops.read_blocks)
    harness.DeviceSampler = lambda: DeviceSampler(ops.draw)


def cells(family: str, seed: int) -> tuple[int, int]:
    """(cells run, cells that differ from the plain single-row run with the same kernels)."""
    with_kernels(family)
    wanted = requests(MIXED, num_tokens=16)
    expected = {codec: run(Case(family, codec=codec), wanted).tokens for codec in AXES["codec"]}
    num_different = 0
    chosen = combinations(seed)
    for cell in chosen:
        codec = cell["codec"]
        changes: dict[str, object] = {"provider": make_provider(cell["provider"], family, expected[codec])}
        if cell["store"] != "none":
            changes["store"] = DictStore()
        case = Case(
            family,
            rows=cell["rows"],
            chunk=cell["chunk"],
            codec=codec,
            block=cell["block"],
            bucketed=cell["shapes"] == "bucketed",
            pipelined=cell["steps"] == "pipelined",
            **changes,
        )
        if run(case, wanted, ARRIVALS).tokens != expected[codec]:
            num_different += 1
            print("differs:", family, *cell.values(), flush=True)
    return len(chosen), num_different


def main(families: list[str]) -> int:
    counts = [cells(family, seed) for seed, family in enumerate(families)]
    num_different = sum(different for _, different in counts)
    print(f"{sum(number for number, _ in counts)} cells, {num_different} differences")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
