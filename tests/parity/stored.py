"""mlx_lm's answers as a file, so that fast kernels do not wait for it: `python -m tests.parity.stored` writes it again.

The file names the releases and the model that it was made with; others make `read` fail with the command to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.parity.reference import fingerprint
from tests.real import ROOT, starter_folder

FILE = Path(__file__).with_name("answers.npz")
STEP = 257  # every such column of the logits is stored: all positions, a part of the vocabulary
# What each process computes; about equal in work, and two, because that is what CI has cores for.
SHARES = (("default", "unicode"), ("system", "turns", "kv8"))
CASES = tuple(case for share in SHARES for case in share)


@dataclass(frozen=True)
class Reference:
    """What mlx_lm says of one conversation: its answer, and logits [T, ...] of the prompt, of every `step`-th token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray
    prefill: np.ndarray
    step: int = 1


def asked(folder: Path, out: Path, shares: Sequence[Sequence[str]]) -> dict[str, Reference]:
    """Asks mlx_lm, each share of the cases in a process of its own."""
    command = [sys.executable, "-m", "tests.parity.reference", str(folder), str(out)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    running = [
        subprocess.Popen([*command, *cases], cwd=ROOT, env=offline, stderr=subprocess.PIPE, text=True)
        for cases in shares
    ]
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    found = {}
    for case in (case for cases in shares for case in cases):
        with np.load(out / f"{case}.npz") as arrays:
            found[case] = Reference(**json.loads((out / f"{case}.json").read_text("utf-8")), **arrays)
    return found


def read(folder: Path) -> dict[str, Reference]:
    with np.load(FILE) as arrays:
        made_with, here = json.loads(str(arrays["made_with"])), fingerprint(folder)
        differ = [name for name, value in here.items() if made_with.get(name) != value]
        assert not differ, (
            f"{FILE.name} was made with other {', '.join(differ)}; python -m tests.parity.stored"
        )
        return {
            case: Reference(
                arrays[f"{case} prompt"].tolist(),
                arrays[f"{case} tokens"].tolist(),
                arrays[f"{case} logprobs"],
                arrays[f"{case} prefill"],
                STEP,
            )
            for case in CASES
        }


def main() -> int:
    folder = starter_folder()
    with tempfile.TemporaryDirectory() as out:
        references = asked(folder, Path(out), SHARES)
    arrays: dict[str, np.ndarray] = {"made_with": np.array(json.dumps(fingerprint(folder)))}
    for case, one in references.items():
        arrays[f"{case} prompt"] = np.array(one.prompt, np.int32)
        arrays[f"{case} tokens"] = np.array(one.tokens, np.int32)
        arrays[f"{case} logprobs"] = one.logprobs
        arrays[f"{case} prefill"] = one.prefill[:, ::STEP]
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {len(references)} answers, {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
