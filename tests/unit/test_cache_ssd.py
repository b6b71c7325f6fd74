from __future__ import annotations

import errno
import logging
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mantou.cache.disk import Disk
from mantou.cache.folder import BLOCKS_NAME
from mantou.cache.index import FILE_NAME
from mantou.cache.ssd import SsdStore
from mantou.errors import ConfigError
from tests.unit.cache_rows import KEY, OTHER, Row, check


def words(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(50_000) for _ in range(count)]


def put(store: SsdStore, tokens: list[int], **changes: Any) -> Row:
    row = Row(tokens, recurrent=store.recurrent, **changes)
    store.put(row.key, tokens, row)
    store.check_integrity()
    return row


def found(store: SsdStore, tokens: list[int], key: Any = KEY) -> int:
    ticket = store.prefetch(key, tokens)
    assert ticket.wait(10)
    hit = store.match(key, tokens)
    if hit is None:
        return 0
    check(hit, tokens, key, recurrent=store.recurrent)
    return hit.num_tokens


def stats(store: SsdStore) -> dict[str, Any]:
    return store.stats()["ssd_cache"]


def files(folder: Path) -> list[Path]:
    return sorted((folder / BLOCKS_NAME).iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_store(folder: Path) -> Iterator[Any]:
    """Opens stores on the folder; each closes the one before, as a restart does."""
    stores: list[SsdStore] = []

    def open_(max_bytes: int = 1 << 30, **changes: Any) -> SsdStore:
        for store in stores:
            store.close()
        stores[:] = [SsdStore(folder, max_bytes, **changes)]
        return stores[0]

    yield open_
    for store in stores:
        store.close()


@pytest.mark.parametrize("length", [2, 255, 256, 257, 700])
@pytest.mark.parametrize("recurrent", [False, True])
def test_prompts_survive_a_restart(open_store: Any, length: int, recurrent: bool) -> None:
    tokens = words(0, length)
    put(open_store(recurrent=recurrent), tokens)
    store = open_store(recurrent=recurrent)
    assert found(store, [*tokens, 1]) == length
    assert found(store, tokens) == (0 if recurrent else length - 1)
    assert stats(store)["longest_durable_prefix_tokens"] == length
    assert store.match(OTHER, [*tokens, 1]) is None and found(store, [*tokens, 1], OTHER) == 0


@pytest.mark.parametrize("parts_at", [1, 100, 256, 257, 511, 599])
def test_a_branch_reads_what_is_shared_and_writes_what_is_new(open_store: Any, parts_at: int) -> None:
    store, tokens = open_store(), words(1, 600)
    put(store, tokens)
    branch = tokens[:parts_at] + words(2, 300)
    assert found(store, branch) == parts_at
    row = put(store, branch)
    assert row.copied[0][0] == parts_at // 256 * 256
    store = open_store()
    assert found(store, [*branch, 1]) == len(branch)
    assert found(store, [*tokens, 1]) == 600


def test_recurrent_prompts_come_back_up_to_a_state(open_store: Any) -> None:
    store, tokens = open_store(recurrent=True), words(3, 600)
    for length in (100, 300, 600):
        put(store, tokens[:length])
    store = open_store(recurrent=True)
    assert found(store, [*tokens, 1]) == 600
    assert found(store, tokens) == 300
    assert found(store, [*tokens[:299], 1, 2]) == 100
    assert found(store, [*tokens[:99], 1, 2]) == 0


def test_longer_columns_replace_the_shorter_ones_of_their_block(open_store: Any, folder: Path) -> None:
    store, tokens = open_store(), words(4, 250)
    for length in range(10, 251, 10):
        put(store, tokens[:length])
    assert [path.name for path in files(folder)] == [store._folder.entries()[0].name]
    assert found(open_store(), [*tokens, 1]) == 250


def test_the_oldest_prompts_go_first_and_their_ends_before_their_beginnings(open_store: Any) -> None:
    size = put(open_store(), words(5, 1024)) and stats(open_store())["bytes"]
    store = open_store(int(size * 2.6))
    second, third = words(6, 1024), words(7, 1024)
    put(store, second)
    assert found(store, [*words(5, 1024), 1]) == 1024  # used again, and so the younger one
    put(store, third)
    assert stats(store)["bytes"] <= size * 2.6
    store = open_store(int(size * 2.6))  # the order survives
    assert found(store, [*third, 1]) == 1024
    assert found(store, [*words(5, 1024), 1]) == 1024
    assert found(store, [*second, 1]) == 512
    store = open_store(int(size * 1.3))
    assert stats(store)["bytes"] <= size * 1.3


def test_a_second_process_is_refused_with_a_reason(open_store: Any, folder: Path) -> None:
    store = open_store()
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        SsdStore(folder, 1 << 30)
    script = "import pathlib, sys; from mantou.cache import ssd; ssd.SsdStore(pathlib.Path(sys.argv[1]), 1)"
    other = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1 and "Another process" in other.stderr
    put(store, words(8, 100))
    store.close()
    assert subprocess.run([sys.executable, "-c", script, folder], check=False).returncode == 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9),
        lambda path: path.write_bytes(path.read_bytes().replace(b"mantou", b"naotum")),
    ],
    ids=["foreign", "truncated", "changed", "other-format"],
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_bad_file_is_removed_and_counted_and_the_rest_is_used(
    open_store: Any, folder: Path, harm: Any, restart: bool
) -> None:
    store, tokens = open_store(), words(9, 700)
    put(store, tokens)
    bad = folder / BLOCKS_NAME / next(e.name for e in store._folder.entries() if e.label.lo == 256)
    harm(bad)
    store = open_store() if restart else store
    assert found(store, [*tokens, 1]) == 256
    assert stats(store)["corrupt_files"] == 1 and not bad.exists()
    put(store, tokens)
    assert found(store, [*tokens, 1]) == 700, "what is missing is written again"


def test_a_file_that_vanished_is_a_miss(open_store: Any, folder: Path) -> None:
    store, tokens = open_store(), words(10, 300)
    put(store, tokens)
    for path in files(folder):
        path.unlink()
    assert found(store, [*tokens, 1]) == 0
    assert stats(store)["corrupt_files"] == 0
    assert found(open_store(), [*tokens, 1]) == 0


@pytest.mark.parametrize("content", [None, b"", b"not a database", b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_lost_or_broken_table_is_made_again_from_the_files(
    open_store: Any, folder: Path, content: bytes | None
) -> None:
    tokens = words(11, 700)
    open_store().close()
    put(open_store(), tokens)
    open_store().close()
    for side in ("-wal", "-shm"):
        (folder / (FILE_NAME + side)).unlink(missing_ok=True)
    (folder / FILE_NAME).unlink() if content is None else (folder / FILE_NAME).write_bytes(content)
    assert found(SsdStoreOnce(folder), [*tokens, 1]) == 700


class SsdStoreOnce(SsdStore):
    """Closes when it is collected, for tests that open one by hand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)

    def __del__(self) -> None:
        self.close()


def test_other_peoples_files_are_left_alone(open_store: Any, folder: Path) -> None:
    open_store()
    mine = [folder / "notes.txt", folder / BLOCKS_NAME / "model.safetensors"]
    for path in mine:
        path.write_text("mine")
    left = folder / BLOCKS_NAME / f"{'0' * 64}.columns.safetensors.tmp"
    left.write_text("half a file")
    open_store()
    assert all(path.read_text() == "mine" for path in mine) and not left.exists()


class Faulty(Disk):
    """Raises for each write while `error` is set."""

    def __init__(self) -> None:
        self.error: int | None = None

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        if self.error is not None:
            with path.with_name(path.name + ".tmp").open("wb") as file:
                file.write(next(iter(parts))[:100])
            path.with_name(path.name + ".tmp").unlink()
            raise OSError(self.error, os.strerror(self.error))
        super().write(path, parts)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_writes_that_fail_are_counted_and_said_once(
    open_store: Any, folder: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Faulty()
    store = open_store(disk=disk)
    first = words(12, 600)
    put(store, first)
    disk.error = error
    with caplog.at_level(logging.WARNING):
        for seed in range(20, 25):
            put(store, words(seed, 600))
    assert stats(store)["failed_spills"] == 15
    assert len(caplog.records) == 1 and os.strerror(error) in caplog.text
    assert found(store, [*first, 1]) == (256 if error == errno.ENOSPC else 600), "what is there stays of use"
    disk.error = None
    second = words(13, 200)
    put(store, second)
    assert found(store, [*second, 1]) == 200
    assert stats(store)["bytes"] == sum(path.stat().st_size for path in files(folder))


def test_a_full_disk_makes_room_of_its_own_from_then_on(open_store: Any) -> None:
    class Small(Disk):
        """A disk of 100 kB."""

        def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
            parts = list(parts)
            used = sum(file.stat().st_size for file in path.parent.iterdir())
            if used + sum(len(part) for part in parts) > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(path, parts)

    store = open_store(disk=Small())
    for seed in range(60):
        put(store, words(seed, 256))
    assert stats(store)["failed_spills"] == 0
    assert found(store, [*words(59, 256), 1]) == 256


def test_a_full_disk_that_stops_the_table_leaves_no_file_behind(
    open_store: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()

    def full(*args: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store._folder._index, "save", full)
    put(store, words(14, 300))
    assert stats(store)["failed_spills"] == 2 and files(folder) == []
    monkeypatch.undo()
    put(store, words(14, 300))
    assert found(store, [*words(14, 300), 1]) == 300


class ReadOnly(Disk):
    def lock(self, path: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def remove(self, path: Path) -> None:
        raise AssertionError("nothing is removed from a read-only folder")

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        raise AssertionError("nothing is written to a read-only folder")


def test_a_read_only_folder_is_read(open_store: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokens = words(15, 600)
    put(open_store(), tokens)
    with caplog.at_level(logging.WARNING):
        store = open_store(disk=ReadOnly())
        assert found(store, [*tokens, 1]) == 600
        put(store, words(16, 300))
    assert len(caplog.records) == 1 and "read only" in caplog.text
    assert stats(store)["read_only"] is True and stats(store)["dropped_spills"] == 1


def test_a_folder_that_cannot_be_made_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        SsdStore(tmp_path / "file" / "cache", 1 << 30)


class Gate(Disk):
    """Writes wait until the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        assert self.open.wait(10)
        super().write(path, parts)


def test_a_full_queue_drops_and_counts_and_never_waits(open_store: Any) -> None:
    gate = Gate()
    store = open_store(disk=gate, max_pending_bytes=30_000)
    tokens = words(17, 3000)
    store.put(KEY, tokens, Row(tokens))
    assert 0 < stats(store)["pending_spill_bytes"] <= 30_000 and stats(store)["dropped_spills"] == 1
    gate.open.set()
    assert store.flush(10)["flushed"]
    kept = found(store, [*tokens, 1])
    assert 0 < kept < 3000
    for _ in range(9):
        put(store, tokens)
    assert found(store, [*tokens, 1]) == 3000, "what was dropped is offered again"


def test_a_queued_part_gives_way_to_the_longer_one(open_store: Any) -> None:
    gate = Gate()
    store, tokens = open_store(disk=gate), words(18, 250)
    store.put(KEY, words(19, 10), Row(words(19, 10)))  # keeps the writer busy
    for length in range(10, 251, 10):
        store.put(KEY, tokens[:length], Row(tokens[:length]))
    gate.open.set()
    assert store.flush(10)["flushed"] and stats(store)["spills"] == 2
    assert found(store, [*tokens, 1]) == 250


def test_the_clock_may_go_backwards(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    size = put(open_store(), words(20, 512)) and stats(open_store())["bytes"]
    for seed in (21, 22, 23):
        now[0] -= 1e6
        put(open_store(int(size * 2.1)), words(seed, 512))
    store = open_store(int(size * 2.1))
    assert found(store, [*words(23, 512), 1]) == found(store, [*words(22, 512), 1]) == 512
    assert found(store, [*words(20, 512), 1]) == 0


def test_the_model_thread_never_reads_and_never_waits(open_store: Any) -> None:
    reading = threading.Event()

    class Slow(Disk):
        def read(self, path: Path) -> bytearray:
            assert threading.current_thread().name == "mantou-ssd-read"
            assert reading.wait(10)
            return super().read(path)

    tokens = words(24, 300)
    put(open_store(), tokens)
    store, woken = open_store(disk=Slow()), threading.Event()
    ticket = store.prefetch(KEY, [*tokens, 1], wake=woken.set)
    assert not ticket.ready and store.match(KEY, [*tokens, 1]) is None, "whoever does not wait computes"
    ticket = store.prefetch(KEY, [*tokens, 1], wake=woken.set)
    reading.set()
    assert woken.wait(10) and ticket.ready
    assert store.match(KEY, [*tokens, 1]) is not None


def test_requests_with_one_prompt_share_a_ticket_and_the_last_one_drops_it(open_store: Any) -> None:
    tokens = words(25, 300)
    store = open_store()
    put(store, tokens)
    first, second = (store.prefetch(KEY, [*tokens, 1]) for _ in range(2))
    assert first is second and first.wait(10)
    first.close()
    assert first.hit is not None
    second.close()
    assert first.hit is None and store.match(KEY, [*tokens, 1]) is None
    assert stats(store)["prefetches"] == 1


def test_what_waits_in_memory_is_bounded(open_store: Any) -> None:
    first, second = words(26, 700), words(27, 700)
    store = open_store(max_staged_bytes=20_000)
    put(store, first)
    put(store, second)
    held = store.prefetch(KEY, [*first, 1])
    assert held.wait(10) and held.hit is not None, "one prompt of any size is read"
    other = store.prefetch(KEY, [*second, 1])
    assert other.wait(10) and other.hit is None and stats(store)["skipped_prefetches"] == 1
    assert store.shrink(1) > 10_000 and held.hit is None
    assert found(store, [*second, 1]) == 700


def test_nothing_to_read_is_nothing_to_wait_for(open_store: Any) -> None:
    store, tokens = open_store(), words(28, 300)
    assert store.prefetch(KEY, tokens).ready
    put(store, tokens)
    assert store.prefetch(KEY, [*tokens, 1], num_useful=300).ready


def test_columns_that_a_window_has_overwritten_are_not_written(open_store: Any) -> None:
    store, tokens = open_store(), words(29, 700)
    put(store, tokens, first_column=300)
    assert found(store, [*tokens, 1]) == 0 and stats(store)["entries"] == 0
    put(store, tokens[:512])
    put(store, tokens, first_column=300)
    assert found(store, [*tokens, 1]) == 700


def test_a_file_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync, synced = tmp_path / "file", os.fsync, []

    def watched(descriptor: int) -> None:
        assert not path.exists()
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    Disk().write(path, [b"abc", memoryview(b"def")])
    assert synced == [6] and path.read_bytes() == b"abcdef"


def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"new"
        raise OSError(errno.EIO, "half way")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="half way"):
        Disk().write(path, parts())
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
