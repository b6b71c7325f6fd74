"""`python -m tests.bench.paged`: rows in blocks of one pool against a buffer a row, interleaved in one process.

For every load: bytes held, milliseconds and tokens a second of a decode step. The model has random weights in the shape
of a real one and its rows random keys and values, so that long rows need no prefill. Knows no servers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mantou.kv.batch import RowSnapshot
from mantou.kv.codecs import make_scheme
from mantou.models.device import this_device
from mantou.models.families import Family
from mantou.models.load import LoadedModel, build, describe
from mantou.models.ops import device_ops
from mantou.models.runner import Runner
from mantou.protocols import DeviceOps, Group

SHAPES = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def loads(longest: int) -> dict[str, list[int]]:
    """Name -> tokens that each row holds."""
    return {
        f"one row at {longest}, fifteen at 200": [longest, *[200] * 15],
        "sixteen rows at 200": [200] * 16,
        "sixteen rows at 1000": [1000] * 16,
        f"one row at {longest}": [longest],
    }


def model(shape: str, dtype: mx.Dtype) -> LoadedModel:
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **SHAPES[shape]}
    module = build("llama", config)
    module.update(tree_map(lambda a: (mx.random.normal(a.shape) * 0.02).astype(dtype), module.parameters()))
    mx.eval(module.parameters())
    return describe(module, config, Family("llama", supported=True))


def snapshot(runner: Runner, length: int, dtype: mx.Dtype) -> RowSnapshot:
    """A row of random numbers as the runner's layers store them; all layers share one."""
    shape, codec = runner.plan.shapes[0], runner.plan.codecs[0]
    parts: list[mx.array] = []
    for (heads, dim), one in ((shape.keys, codec.keys), (shape.values, codec.values)):
        parts += one.pack(mx.random.normal((1, heads, length, dim)).astype(dtype))
    mx.eval(parts)
    return RowSnapshot(length, tuple(tuple(parts) for _ in runner.plan.shapes))


def fill(runner: Runner, lengths: Sequence[int], dtype: mx.Dtype) -> None:
    runner.kv.resize(0)
    mx.clear_cache()
    runner.kv.resize(len(lengths))
    for length in set(lengths):
        row = snapshot(runner, length, dtype)
        for slot in (slot for slot, other in enumerate(lengths) if other == length):
            runner.kv.restore(slot, row)
            runner.wait()


def step_ms(runner: Runner, num_rows: int, steps: int) -> list[float]:
    group, times = Group(0, 1, (1,) * num_rows), []
    for step in range(steps):
        started = time.perf_counter()
        _, logits = runner.forward(group, [[step % 100]] * num_rows, None)
        mx.eval(mx.argmax(logits, axis=-1), runner.kv.arrays())
        runner.kv.commit(group, group.num_tokens)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def compare(
    loaded: LoadedModel, ops: DeviceOps, codec: str, block: int, longest: int, rounds: int, steps: int
) -> list[dict[str, Any]]:
    dtype = mx.bfloat16 if loaded.dtype == "bfloat16" else mx.float32
    span_step = 1 if mx.default_device() == mx.cpu else 256
    options = {"span_step": span_step, "write_rows": ops.write_rows}
    read_blocks = ops.read_blocks if ops.reads_blocks else None
    runners = {
        "buffers": Runner(loaded, make_scheme(codec), **options),
        "blocks": Runner(loaded, make_scheme(codec), block=block, read_blocks=read_blocks, **options),
    }
    found = []
    for name, lengths in loads(longest).items():
        times: dict[str, list[float]] = {kind: [] for kind in runners}
        for runner in runners.values():
            fill(runner, lengths, dtype)
            step_ms(runner, len(lengths), 3)
        for _ in range(rounds):
            for kind, runner in runners.items():
                times[kind] += step_ms(runner, len(lengths), steps)
        row: dict[str, Any] = {"load": name, "codec": codec, "rows": len(lengths)}
        for kind, runner in runners.items():
            ms = statistics.median(times[kind])
            row[kind] = {"ms": ms, "tok_s": len(lengths) / ms * 1e3, "kv_bytes": runner.kv.nbytes}
            runner.kv.resize(0)
        row["time_ratio"] = row["blocks"]["ms"] / row["buffers"]["ms"]
        row["memory_ratio"] = row["blocks"]["kv_bytes"] / row["buffers"]["kv_bytes"]
        found.append(row)
        print(
            name,
            codec,
            {key: row[key] for key in row if key not in ("load", "codec")},
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--codec", action="append", help="names of --kv-quant; default: off")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, help="a JSON file")
    asked = parser.parse_args()
    device = this_device()
    loaded = model(asked.shape, getattr(mx, asked.dtype))
    ops = device_ops(device.kind)
    notes = ops.install(loaded.module)
    result = {
        "device": device.name,
        "machine": platform.machine(),
        "mlx": mx.__version__,
        "notes": list(notes),
        "shape": asked.shape,
        "dtype": asked.dtype,
        "block": asked.block,
        "rounds": asked.rounds,
        "steps": asked.steps,
        "paged": [
            row
            for codec in asked.codec or ["off"]
            for row in compare(loaded, ops, codec, asked.block, asked.longest, asked.rounds, asked.steps)
        ],
    }
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
