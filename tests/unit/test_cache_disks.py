"""Real file systems in a bad state: full, read only, with bits that flipped. Nothing wrong is served, nothing stops."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mantou.cache.folder import LOCK_NAME
from mantou.cache.index import FILE_NAME
from mantou.cache.ssd import SsdStore
from tests.unit.cache_rows import KEY, Row, check

ROOT = Path(__file__).parents[2]
ROOMY = 1 << 30


def words(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(50_000) for _ in range(count)]


PROMPTS = [words(1, 700), [*words(1, 300), *words(2, 250)], words(3, 40)]


def put(store: SsdStore, tokens: list[int]) -> None:
    store.put(KEY, tokens, Row(tokens, recurrent=True))
    assert store.flush(30)["flushed"]


def found(store: SsdStore, tokens: list[int]) -> int:
    assert store.prefetch(KEY, tokens).wait(30)
    hit = store.match(KEY, tokens)
    if hit is None:
        return 0
    check(hit, tokens, recurrent=True)
    return hit.num_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with columns, states, a table that was closed, and beside it one as a killed server leaves it."""
    place = tmp_path_factory.mktemp("disks")
    store = SsdStore(place / "closed", ROOMY, recurrent=True)
    for tokens in PROMPTS:
        put(store, tokens)
    shutil.copytree(place / "closed", place / "killed")
    store.close()
    return place


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", LOCK_NAME])
@pytest.mark.parametrize("state", ["closed", "killed"])
def test_flipped_bits_beside_the_blocks_cost_no_wrong_token(
    folder: Path, tmp_path: Path, name: str, state: str
) -> None:
    if not (folder / state / name).exists():
        assert state == "closed" and name != FILE_NAME
        return
    content, served = (folder / state / name).read_bytes(), 0
    for seed in range(25 if content else 0):
        dice, place = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(folder / state, place)
        damaged = bytearray(content)
        for _ in range(dice.choice([1, 1, 40])):
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        (place / name).write_bytes(damaged)
        store = SsdStore(place, ROOMY, recurrent=True)
        served += sum(found(store, [*tokens, 1]) == len(tokens) for tokens in PROMPTS)
        store.check_integrity()
        put(store, words(seed + 10, 300))
        assert found(store, [*words(seed + 10, 300), 1]) == 300
        store.close()
    assert served == (75 if content else 0), "what the table lost is told by the files"


def test_a_row_of_the_table_that_was_changed_is_not_believed(folder: Path, tmp_path: Path) -> None:
    """A position that is one block off would put good columns in the wrong place."""
    for number, change in enumerate(
        (
            "lo = lo + 256",
            "lo = 0",
            "tokens = zeroblob(length(tokens))",
            "parent = address",
            "kind = 'state'",
            "key = 'x'",
            "nbytes = 'many'",
            "used = 'never'",
        )
    ):
        place = tmp_path / str(number)
        shutil.copytree(folder / "closed", place)
        with sqlite3.connect(place / FILE_NAME) as table:
            table.execute(f"UPDATE blocks SET {change}")
        table.close()
        store = SsdStore(place, ROOMY, recurrent=True)
        assert [found(store, [*tokens, 1]) for tokens in PROMPTS] == [700, 550, 40], change
        assert store.stats()["ssd_cache"]["corrupt_files"] == 0
        store.close()


@pytest.mark.parametrize("kind", ["columns", "state"])
def test_flipped_bits_in_every_block_are_misses(folder: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(folder / "closed", tmp_path / "cache")
    dice = random.Random(7)
    damaged = [*(tmp_path / "cache" / "blocks").glob(f"*.{kind}.safetensors")]
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
    store = SsdStore(tmp_path / "cache", ROOMY, recurrent=True)
    assert [found(store, [*tokens, 1]) for tokens in PROMPTS] == [0, 0, 0]
    assert store.stats()["ssd_cache"]["corrupt_files"] > 0
    for tokens in PROMPTS * len(
        damaged
    ):  # each look finds the next bad file of a prompt, and writes it again
        put(store, tokens)
        found(store, [*tokens, 1])
    assert [found(store, [*tokens, 1]) for tokens in PROMPTS] == [700, 550, 40]
    assert store.stats()["ssd_cache"]["corrupt_files"] == len(damaged)
    store.close()


FULL = """
import json, pathlib, resource, signal, sys
from mantou.cache.ssd import SsdStore
from tests.unit.test_cache_disks import PROMPTS, ROOMY, found, put, words
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SsdStore(pathlib.Path(sys.argv[1]), ROOMY, recurrent=True)
put(store, PROMPTS[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for tokens in PROMPTS[:2]:
    put(store, tokens)
    found(store, [*tokens, 1])
limited = store.stats()["ssd_cache"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
put(store, PROMPTS[0])
reached = [found(store, [*PROMPTS[0], 1]), found(store, [*PROMPTS[2], 1])]
store.check_integrity()
store.close()
print(json.dumps([limited["failed_spills"], *reached]))
"""


@pytest.mark.parametrize("limit", [0, 1000, 5000, 30_000])
def test_a_file_system_that_takes_no_more_costs_time_only(tmp_path: Path, limit: int) -> None:
    """The kernel ends writes at this size, in the middle of a block or of the table."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "cache"), str(limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    failed, again, small = json.loads(done.stdout)
    assert failed > 0 and (again, small) == (700, 40)
    assert not [*(tmp_path / "cache" / "blocks").glob("*.tmp")]


READ_ONLY = """
import json, os, pathlib, sys
from mantou.cache.ssd import SsdStore
from tests.unit.test_cache_disks import PROMPTS, ROOMY, found, put, words
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = SsdStore(pathlib.Path(sys.argv[1]), ROOMY, recurrent=True)
put(store, words(9, 300))
reached = [found(store, [*tokens, 1]) for tokens in PROMPTS]
print(json.dumps([store.stats()["ssd_cache"]["read_only"], *reached]))
store.close()
"""


@pytest.fixture
def read_only(folder: Path) -> Iterator[Path]:
    """A copy that others may read and nobody may write, where an unprivileged process gets to it."""
    place = Path(tempfile.mkdtemp(prefix="mantou-read-only-"))
    shutil.copytree(folder / "closed", place / "cache")
    for path in [place, *place.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield place / "cache"
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(place)


def test_a_folder_without_the_right_to_write_is_read(read_only: Path) -> None:
    command = [sys.executable, "-c", READ_ONLY, str(read_only)]
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 700, 550, 40]
    assert "read only" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before
