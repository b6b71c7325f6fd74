"""`python -m tests.bench.many_tokens`: products of many tokens with quantised weights, by every instruction set here.

For prompts: AMX against AVX-512 against AVX2, exact and int8 activations, in interleaved rounds. Says what the probe
for AMX found, and compares the bits of all. Knows no models.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import mlx.core as mx

from mantou.models.ops.extension import kernels
from tests.bench.kernels import packed

SHAPES = {"135M gate+up": (3072, 576), "135M down": (576, 1536), "1B gate+up": (16384, 2048)}
PLANES = {"exact": 2, "int8": 1}


def seconds(x: mx.array, weights: Any, planes: int, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        mx.eval(kernels.linear(x, weights, planes=planes))
    return (time.perf_counter() - started) / times


def unlike(x: mx.array, weights: Any) -> list[str]:
    """Names of kernels whose bits are not those of the first."""
    found: list[str] = []
    for planes in PLANES.values():
        first = None
        for name in kernels.runnable_kernels():
            kernels.select_kernels(name)
            y = kernels.linear(x, weights, planes=planes)
            mx.eval(y)
            first = y if first is None else first
            if not mx.array_equal(y, first):
                found.append(name)
    return found


def row(form: str, shape: str, num_tokens: int, rounds: int) -> list[str]:
    """Table rows, one for each kind of activations: GMAC/s by instruction set, medians of interleaved rounds."""
    import numpy as np

    rows, k = SHAPES[shape]
    weights = packed(form, rows, k, np.random.default_rng(0))
    x = mx.random.normal((num_tokens, k), key=mx.random.key(0))
    wrong = unlike(x, weights)
    work = rows * k * num_tokens / 1e9
    times = max(1, round(0.4 / work))
    names, lines = kernels.runnable_kernels(), []
    for label, planes in PLANES.items():
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name in names:
                kernels.select_kernels(name)
                found[name].append(seconds(x, weights, planes, times))
        speeds = [work / statistics.median(found[name][1:]) for name in names]
        cells = [f"{form} {shape}", str(num_tokens), label, *(f"{s:.0f}" for s in speeds)]
        lines.append("| " + " | ".join([*cells, "no: " + ", ".join(wrong) if wrong else "yes"]) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 16, 128, 512])
    parser.add_argument("--forms", nargs="*", default=["4-bit", "8-bit"])
    args = parser.parse_args()
    kernels.set_threads(args.threads or kernels.usable_cpus())
    names = kernels.runnable_kernels()
    print(f"AMX: {kernels.amx()}. Kernels: {', '.join(names)}; {kernels.threads()} threads. GMAC/s:\n")
    print("| weights | tokens | activations | " + " | ".join(names) + " | same bits |")
    print("|---" * (len(names) + 4) + "|")
    for form in args.forms:
        for shape in SHAPES:
            for num_tokens in args.tokens:
                print("\n".join(row(form, shape, num_tokens, args.rounds)), flush=True)
    kernels.select_kernels(names[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
