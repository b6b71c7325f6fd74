"""`python -m tests.bench.kernels`: the CPU kernels alone, next to what memory gives in the same run.

For every shape and format: the weights' bytes per second at one row, and c(M), the time of M rows in that of one. For
many rows in f32: OpenBLAS in the same run. For a model: graph nodes and milliseconds of a decode step with plain MLX,
with generic operations and fused. Knows no servers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.models.ops.extension import kernels

ROWS = (1, 2, 4, 8, 16)
FORMATS = ("4-bit", "8-bit", "bf16")
# name -> (output rows, input length)
SHAPES = {
    "135M qkv": (960, 576),
    "135M gate+up": (3072, 576),
    "135M head": (49152, 576),
    "1B qkv": (3072, 2048),
    "1B gate+up": (16384, 2048),
    "1B down": (2048, 8192),
    "3B gate+up": (16384, 3072),
    "3B down": (3072, 8192),
}
# Of encoders, in f32, next to OpenBLAS through numpy: name -> (rows, output rows, input length)
DENSE = {
    "MiniLM up, 128 tokens": (128, 1536, 384),
    "MiniLM down, 128 tokens": (128, 384, 1536),
    "BERT-base qkv, 128 tokens": (128, 2304, 768),
    "BERT-base up, 512 tokens": (512, 3072, 768),
    "Whisper-tiny up, 1500 frames": (1500, 1536, 384),
    "Whisper-tiny down, 1500 frames": (1500, 384, 1536),
    "Whisper-base qkv, 1500 frames": (1500, 1536, 512),
    "Whisper-small up, 1500 frames": (1500, 3072, 768),
}
CACHES = 192 << 20  # bytes of weights walked in turn: far more than the last-level cache keeps
AT_ONCE = 8  # products of one evaluation: their results should stay in the allocator's free lists


def stream_gb_s(threads: int) -> float:
    """Read bandwidth of memory, from a few lines of C that are compiled for the purpose."""
    source = Path(__file__).with_name("stream.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", source, "-o", library]
        subprocess.run(command, check=True)
        read = ctypes.CDLL(str(library)).stream_seconds
        read.restype = ctypes.c_double
        data = np.ones(256 << 20, np.uint8)
        start = -data.ctypes.data % 64
        size = data.nbytes - 64
        address = ctypes.c_void_p(data.ctypes.data + start)
        return size / read(address, ctypes.c_size_t(size), threads, 7) / 1e9


def packed(form: str, rows: int, k: int, rng: np.random.Generator) -> Any:
    if form == "bf16":
        bits = rng.integers(0x3C00, 0x3D00, (rows, k), dtype=np.uint16)
        return kernels.pack_dense([mx.array(bits).view(mx.bfloat16)])[0]
    bits = int(form[0])
    words = mx.array(rng.integers(0, 1 << 32, (rows, k * bits // 32), dtype=np.uint32))
    scales = mx.array(rng.random((rows, k // 32)).astype(np.float16))
    return kernels.pack_affine([words], [scales], [-8 * scales], group_size=32, bits=bits)[0]


def linear_us(weights: list[Any], num_rows: int, k: int, rounds: int) -> float:
    """Median microseconds of one product; the matrices take turns, so that no cache holds the next."""
    x = mx.random.normal((num_rows, k))
    mx.eval(x)
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for first in range(0, len(weights), AT_ONCE):
            mx.eval([kernels.linear(x, w) for w in weights[first : first + AT_ONCE]])
        times.append((time.perf_counter() - started) / len(weights) * 1e6)
    return statistics.median(times[1:])


def products(threads: int, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    kernels.set_threads(threads)
    found = []
    for form in FORMATS:
        for name, (rows, k) in SHAPES.items():
            first = packed(form, rows, k, rng)
            copies = math.ceil(CACHES / first.nbytes)
            weights = [first, *(packed(form, rows, k, rng) for _ in range(copies - 1))]
            us = {m: linear_us(weights, m, k, rounds) for m in ROWS}
            gb_s = first.nbytes / us[1] / 1e3
            found.append({"shape": name, "rows": rows, "k": k, "form": form, "us": us, "gb_s": gb_s})
    return found


def many_rows(rounds: int, product: Callable[[np.ndarray, np.ndarray], Callable[[], Any]]) -> list[float]:
    """Median milliseconds of x w^T for each shape of DENSE."""
    rng = np.random.default_rng(0)
    found = []
    for rows, outputs, k in DENSE.values():
        run = product(*(rng.standard_normal(shape, np.float32) for shape in ((rows, k), (outputs, k))))
        times = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) / AT_ONCE * 1e3)
        found.append(statistics.median(times[1:]))
    return found


def our_product(x: np.ndarray, w: np.ndarray) -> Callable[[], Any]:
    rows, packed_w = mx.array(x), kernels.pack_dense([mx.array(w)])[0]
    mx.eval(rows)
    return lambda: mx.eval([kernels.linear(rows, packed_w) for _ in range(AT_ONCE)])


def openblas_product(x: np.ndarray, w: np.ndarray) -> Callable[[], Any]:
    return lambda: [x @ w.T for _ in range(AT_ONCE)]


def dense(threads: int, rounds: int) -> list[dict[str, Any]]:
    """Products of many rows in f32, ours and OpenBLAS's, each with all threads and in turns. That has its own process:
    its threads spin on for a while, and ours would make room for them."""
    kernels.set_threads(threads)
    command = [sys.executable, "-m", "tests.bench.kernels", "--openblas", "--rounds", str(rounds)]
    ours, other = [], []
    for _ in range(3):
        ours.append(many_rows(rounds, our_product))
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        other.append(json.loads(done.stdout.splitlines()[-1]))
    medians = [[statistics.median(turns) for turns in zip(*who, strict=True)] for who in (ours, other)]
    return [
        {"shape": name, "sizes": sizes, "ms": {"ours": one, "openblas": two}}
        for (name, sizes), one, two in zip(DENSE.items(), *medians, strict=True)
    ]


def graph_nodes(*outputs: mx.array) -> int:
    """Operations that an evaluation would run."""
    with tempfile.NamedTemporaryFile(suffix=".dot") as file:
        mx.export_to_dot(file.name, *outputs)
        return Path(file.name).read_text().count("shape=rectangle")


def decode(model: Path, form: str, steps: int) -> dict[str, Any]:
    """Nodes and milliseconds of a decode step of one row. form: plain, generic or fused."""
    from mantou.kv.codecs import Native, Uniform
    from mantou.models.load import load
    from mantou.models.ops import cpu
    from mantou.models.runner import Runner
    from mantou.protocols import Group

    loaded = load(model)
    if form != "plain":

        class Generic(cpu.CpuOps):
            def _fuse(self, model: object) -> int:
                return 0

        (Generic if form == "generic" else cpu.CpuOps)().install(loaded.module)
    runner = Runner(loaded, Uniform(Native()))
    runner.kv.resize(1)
    group = Group(0, 1, (1,))
    nodes, times = 0, []
    for step in range(steps):
        started = time.perf_counter()
        _, logits = runner.forward(group, [[step % 100]], [[0]])
        token = mx.argmax(logits, axis=-1)
        if step == 1:
            nodes = graph_nodes(token, *runner.kv.arrays())
        mx.eval(token, runner.kv.arrays())
        runner.kv.commit(group, (1,))
        times.append((time.perf_counter() - started) * 1e3)
    layers = len(loaded.shapes)
    return {"form": form, "nodes": nodes, "nodes_a_layer": nodes / layers, "ms": statistics.median(times[2:])}


def in_own_process(model: Path, form: str, steps: int) -> dict[str, Any]:
    """The entry points of mx.fast are replaced for a whole process, so each form gets its own."""
    command = [sys.executable, "-m", "tests.bench.kernels", "--decode", form, "--model", str(model)]
    done = subprocess.run([*command, "--steps", str(steps)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(result: dict[str, Any]) -> str:
    stream = result["stream_gb_s"]
    lines = [f"Memory gives {stream:.1f} GB/s to {result['threads']} threads in this run.", ""]
    lines += [
        "| weights | GB/s at one row | of the stream | " + " | ".join(f"c({m})" for m in ROWS[1:]) + " |"
    ]
    lines += ["|---" * (len(ROWS) + 2) + "|"]
    for one in result["products"]:
        cost = [one["us"][m] / one["us"][1] for m in ROWS[1:]]
        cells = [f"{one['form']} {one['shape']}", f"{one['gb_s']:.1f}", f"{one['gb_s'] / stream:.0%}"]
        lines.append("| " + " | ".join([*cells, *(f"{c:.2f}" for c in cost)]) + " |")
    lines += ["", "| f32, many rows | ms | OpenBLAS | speed |", "|---|---|---|---|"]
    for one in result["dense"]:
        ours, other = one["ms"]["ours"], one["ms"]["openblas"]
        lines.append(f"| {one['shape']} | {ours:.2f} | {other:.2f} | {other / ours:.2f}x |")
    if result["decode"]:
        lines += ["", "| decode step | graph nodes | a layer | ms |", "|---|---|---|---|"]
        for one in result["decode"]:
            lines.append(f"| {one['form']} | {one['nodes']} | {one['nodes_a_layer']:.1f} | {one['ms']:.2f} |")
    return "\n".join(lines)


def measured(say: Callable[[str], None], args: argparse.Namespace) -> dict[str, Any]:
    threads = args.threads or kernels.usable_cpus()
    result: dict[str, Any] = {"threads": threads, "stream_gb_s": stream_gb_s(threads), "decode": []}
    result["dense"] = dense(threads, args.rounds)
    result["products"] = products(threads, args.rounds)
    if args.model:
        for form, steps in (("plain", 6), ("generic", args.steps), ("fused", args.steps)):
            say(f"decode, {form}")
            result["decode"].append(in_own_process(args.model, form, steps))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="MLX model folder whose decode step is counted and timed")
    parser.add_argument("--threads", type=int, help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    parser.add_argument("--openblas", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.openblas:
        print(json.dumps(many_rows(args.rounds, openblas_product)))
        return 0
    if args.decode:
        print(json.dumps(decode(args.model, args.decode, args.steps)))
        return 0
    result = measured(lambda text: print(text, file=sys.stderr, flush=True), args)
    print(table(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
