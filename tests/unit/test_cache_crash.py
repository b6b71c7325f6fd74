"""A hundred processes are killed at random points of writing. Afterwards every prompt restores exactly, or misses.

MANTOU_KILLS sets another number of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mantou.cache.ssd import SsdStore
from tests.unit.cache_crash import MAX_BYTES, prompt
from tests.unit.cache_rows import KEY, check

NUM_KILLS = int(os.environ.get("MANTOU_KILLS", "100"))
ROOT = Path(__file__).parents[2]


def test_killed_processes_leave_nothing_wrong_behind(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    restored = killed = 0
    for first in range(0, NUM_KILLS, 10):
        killed += kill(folder, range(first, first + 10))
        restored += look(folder, range(first * 4, first * 4 + 40))
    assert killed >= NUM_KILLS * 0.8
    assert restored >= NUM_KILLS // 10, "a cache that is always empty is never wrong"


def test_files_written_under_their_own_names_are_noticed(tmp_path: Path) -> None:
    """Proof that the test above can fail. Ten kills may all miss a write, so it goes on until one is noticed."""

    def kill_and_look() -> None:
        for first in range(0, 400, 10):
            kill(tmp_path / "cache", range(first, first + 10), "--in-place")
            look(tmp_path / "cache", range(first * 4, first * 4 + 40))

    with pytest.raises(AssertionError):
        kill_and_look()


def kill(folder: Path, seeds: range, *flags: str) -> int:
    """How many of the children died before they were done."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cache_crash", *flags, str(folder), *map(str, seeds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return sum(json.loads(line)["killed"] for line in done.stdout.splitlines())


def look(folder: Path, prompts: range) -> int:
    """How many of the prompts the folder still serves; each of them is compared with what was computed."""
    store = SsdStore(folder, MAX_BYTES, recurrent=True)
    found = 0
    for number in prompts:
        tokens = [*prompt(number), 1]
        assert store.prefetch(KEY, tokens).wait(10)
        hit = store.match(KEY, tokens)
        if hit is not None:
            check(hit, tokens, recurrent=True)
            found += 1
    store.check_integrity()
    stats = store.stats()["ssd_cache"]
    assert stats["corrupt_files"] == 0, "a file that has its name is whole"
    assert not list((folder / "blocks").glob("*.tmp"))
    names = {path.name for path in (folder / "blocks").iterdir()}
    assert names == {entry.name for entry in store._folder.entries()}
    store.close()
    return found
