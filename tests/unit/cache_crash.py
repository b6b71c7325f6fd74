"""Children that write to an SSD cache and die at a given point. Run as a script: it forks, because starting Python a
hundred times would take minutes. It starts no thread and runs nothing of MLX before it forks.

    python cache_crash.py FOLDER SEED...              one child a seed; prints one JSON line for each
    python cache_crash.py --in-place FOLDER SEED...   the planted fault: files are written under their own names
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mantou.cache.disk import Disk
from mantou.cache.ssd import SsdStore
from tests.unit.cache_rows import Row

MAX_BYTES = 60_000  # small, so that removing is part of it
NUM_POINTS = 160  # about as many as a child passes


def prompt(seed: int) -> list[int]:
    """Prompts of different seeds share beginnings of different lengths."""
    dice = random.Random(seed)
    shared = [random.Random(seed % 3).randrange(50_000) for _ in range(dice.choice([0, 100, 256, 400]))]
    return shared + [dice.randrange(50_000) for _ in range(dice.randrange(1, 700))]


class Deadly(Disk):
    """Each small step of writing and removing is a point at which the process may be killed."""

    def __init__(self, at: int, report: int) -> None:
        self.left, self.report = at, report

    def point(self) -> None:
        os.write(self.report, b".")  # whoever reads may kill at any later moment
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        def slowly() -> Iterable[memoryview]:
            for part in parts:
                view = memoryview(part)
                for lo in range(0, len(view), max(len(view) // 3, 1)):
                    self.point()
                    yield view[lo : lo + max(len(view) // 3, 1)]

        super().write(path, slowly())
        self.point()

    def remove(self, path: Path) -> None:
        self.point()
        super().remove(path)
        self.point()


class InPlace(Deadly):
    """What a disk must not do."""

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        with path.open("wb") as file:
            for part in parts:
                view = memoryview(part)
                for lo in range(0, len(view), max(len(view) // 3, 1)):
                    self.point()
                    file.write(view[lo : lo + max(len(view) // 3, 1)])
                    file.flush()
            os.fsync(file.fileno())
        self.point()


def child(folder: Path, seed: int, disk: Disk) -> None:
    store = SsdStore(folder, MAX_BYTES, recurrent=True, disk=disk)
    for number in range(seed * 4, seed * 4 + 4):
        tokens = prompt(number)
        for end in {len(tokens) // 2, len(tokens)} - {0}:
            store.put(Row(tokens).key, tokens[:end], Row(tokens[:end], recurrent=True))
    store.close()


def run(folder: Path, seed: int, kind: type[Deadly] = Deadly) -> dict[str, Any]:
    """Even seeds die at a counted point, odd ones are killed from outside once so many points were passed."""
    at = random.Random(seed).randrange(1, NUM_POINTS)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            child(folder, seed, kind(at if seed % 2 == 0 else -1, writer))
        finally:
            os._exit(0)
    os.close(writer)
    seen = 0
    while (part := os.read(reader, 64)) != b"":
        seen += len(part)
        if seed % 2 == 1 and seen >= at:
            os.kill(pid, signal.SIGKILL)
            break
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return {"seed": seed, "killed": os.WIFSIGNALED(status), "points": seen}


if __name__ == "__main__":
    in_place = sys.argv[1] == "--in-place"
    where, *seeds = sys.argv[1 + in_place :]
    for number in map(int, seeds):
        print(json.dumps(run(Path(where), number, InPlace if in_place else Deadly)), flush=True)
