"""Embedding throughput beside onnxruntime f32: the same rows, in turn, on the same CPU, in one run.

usage: python -m tests.bench.embeddings --other PYTHON   (a Python with onnx, onnxruntime and safetensors)
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from mantou.data import TokenRow
from mantou.engine.embedding_queue import choose
from mantou.models.device import this_device
from mantou.models.embedder import Embedder, load_embedder
from mantou.models.ops import device_ops
from tests.embedding_folders import minilm_folder

BATCH = 32
BUDGET = 4096  # padded tokens of one forward
SETTLE_S = (
    0.1  # before each run: the other's threads spin for a while after theirs, on cores that this one needs
)


def rows(draw: np.random.Generator, low: int, high: int) -> list[list[int]]:
    return [draw.integers(1000, 29000, draw.integers(low, high + 1)).tolist() for _ in range(BATCH)]


def in_batches(ours: Embedder, batch: list[list[int]]) -> np.ndarray:
    """As the server does it: rows of like lengths in one forward."""
    found = np.zeros((len(batch), ours.num_dims), np.float32)
    left = list(range(len(batch)))
    while left:
        chosen = [left[index] for index in choose([len(batch[i]) for i in left], BUDGET)]
        found[chosen] = ours.run([TokenRow(tuple(batch[i])) for i in chosen])
        left = [i for i in left if i not in chosen]
    return found


class Other:
    """onnxruntime in a process of its own."""

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        script = Path(__file__).with_name("embeddings_onnx.py")
        self._process = subprocess.Popen(
            [python, script, folder, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._read()["version"]

    def run(self, batch: list[list[int]]) -> tuple[float, np.ndarray]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(batch)}\n")
        self._process.stdin.flush()
        answer = self._read()
        return answer["seconds"], np.array(answer["vectors"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    folder = minilm_folder()
    other = Other(options.other, folder, options.threads)
    ours = load_embedder(folder, device_ops(this_device().kind, threads=options.threads))
    draw = np.random.default_rng(0)
    report: dict[str, Any] = {"onnxruntime": other.version, "batch": BATCH, "cases": {}}
    for name, low, high in (("16", 16, 16), ("32", 32, 32), ("128", 128, 128), ("8 to 64", 8, 64)):
        times: dict[str, list[float]] = {"mantou": [], "onnxruntime": []}
        worst = 1.0
        for number in range(options.rounds + 1):
            batch = rows(draw, low, high)
            time.sleep(SETTLE_S)
            seconds, want = other.run(batch)
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            found = in_batches(ours, batch)
            spent = time.perf_counter() - start
            worst = min(worst, float((found * want).sum(1).min()))
            if number:  # the first is to warm up
                times["mantou"].append(spent)
                times["onnxruntime"].append(seconds)
        middle = {who: statistics.median(found) for who, found in times.items()}
        report["cases"][name] = {
            **{f"{who}_ms": round(1000 * seconds, 2) for who, seconds in middle.items()},
            "ratio": round(middle["onnxruntime"] / middle["mantou"], 3),
            "worst_cosine": worst,
        }
        print(name, json.dumps(report["cases"][name]), flush=True)
    other.close()
    print(json.dumps(report))


main()
