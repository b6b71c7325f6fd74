"""The same, through a restart: what comes back from disk gives the tokens of the cold run."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mantou.cache.disk import Disk
from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from tests.compose.harness import VOCAB, Case, run
from tests.compose.test_prefix_ram import (
    FAMILIES,
    RECURRENT,
    cached_tokens,
    cold,
    serve,
    small_rings,
    turn,
    words,
)

__all__ = ["small_rings"]  # a fixture that every test here uses


@pytest.fixture
def restart(tmp_path: Path) -> Iterator[Any]:
    """Opens the tiers anew: what memory held is gone."""
    opened: list[Any] = []

    def open_(family: str, memory_bytes: int = 1 << 30) -> Any:
        for store in opened:
            store.check_integrity()
            store.close()
        recurrent = family in RECURRENT
        disk = SsdStore(tmp_path / "cache", 1 << 30, recurrent=recurrent)
        memory = RamStore(memory_bytes, recurrent=recurrent)
        opened[:] = [Tiered(memory, disk) if memory_bytes else disk]
        return opened[0]

    yield open_
    for store in opened:
        store.close()


@pytest.mark.parametrize("memory_bytes", [1 << 30, 200_000, 0], ids=["roomy", "tight", "disk-only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_after_every_restart(family: str, memory_bytes: int, restart: Any) -> None:
    prompt, held = words(50, 300), 0
    for number in range(3):
        request = turn(f"t{number}", prompt, "chat")
        answer, cached = serve(family, restart(family, memory_bytes), request)
        assert cached == held
        assert serve(family, restart(family, memory_bytes), request)[1] == len(prompt) - 1
        held = len(prompt) + len(answer) - 1
        prompt = (*prompt, *answer, *words(150 + number, 30))


@pytest.mark.parametrize("parts_at", [64, 255, 257, 305])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_after_a_restart_equals_its_cold_run(family: str, parts_at: int, restart: Any) -> None:
    answer, _ = serve(family, restart(family), turn("a", words(51, 300)))
    whole = (*words(51, 300), *answer)
    branch = turn("b", (*whole[:parts_at], (whole[parts_at] + 1) % VOCAB, *words(52, 40)))
    states = [0, *(state for state in (256, 299, 311) if state <= parts_at)]
    assert serve(family, restart(family), branch)[1] == (states[-1] if family in RECURRENT else parts_at)


@pytest.mark.parametrize("codec", ["8", "4"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_packed_columns_survive_a_restart(family: str, codec: str, restart: Any) -> None:
    answer, _ = serve(family, restart(family), turn("a", words(53, 150)), codec=codec)
    again = turn("b", (*words(53, 150), *answer, 1, 2, 3))
    assert serve(family, restart(family), again, codec=codec)[1] == 161
    other = "4" if codec == "8" else "8"
    assert serve(family, restart(family), again, codec=other)[1] == 0, "each codec has its own key"


@pytest.mark.parametrize("family", FAMILIES)
def test_many_rows_after_a_restart(family: str, restart: Any) -> None:
    system = words(54, 270)
    wanted = [turn(f"r{i}", (*system, *words(60 + i, 20 + 9 * i))) for i in range(4)]
    run(Case(family, rows=3, chunk=64, store=restart(family)), wanted, {"r1": 3, "r2": 8})
    outcome = run(Case(family, rows=3, chunk=64, store=restart(family)), wanted, {"r1": 3, "r2": 8})
    for request in wanted:
        assert outcome.tokens[request.id] == cold(family, request)
        assert cached_tokens(outcome, request.id) == len(request.prompt) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_damaged_files_cost_time_and_no_token(family: str, restart: Any, tmp_path: Path) -> None:
    request = turn("a", words(55, 600))
    serve(family, restart(family), request)
    store = restart(family)
    files = sorted((tmp_path / "cache" / "blocks").iterdir())
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[len(content) * (number + 1) // (len(files) + 1)] ^= 1 << number % 8
        path.write_bytes(content)
    assert serve(family, store, request)[1] == 0
    assert store.stats()["ssd_cache"]["corrupt_files"] > 0
    for _ in files:  # each run finds the next bad file, and writes again what is missing
        _, cached = serve(family, restart(family), request)
    assert cached == 599


class Moody(Disk):
    """Fails now and then, in reading and in writing, as a full or a dying device does."""

    def __init__(self) -> None:
        self.dice = random.Random(3)
        self.num_failures = 0

    def _maybe(self, error: int) -> None:
        if self.dice.random() < 0.4:
            self.num_failures += 1
            raise OSError(error, os.strerror(error))

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        self._maybe(self.dice.choice([errno.ENOSPC, errno.EIO]))
        super().write(path, parts)

    def read(self, path: Path) -> bytearray:
        self._maybe(errno.EIO)
        return super().read(path)

    def remove(self, path: Path) -> None:
        self._maybe(errno.EIO)
        super().remove(path)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_disk_that_fails_now_and_then_costs_no_token(family: str, tmp_path: Path) -> None:
    disk, recurrent = Moody(), family in RECURRENT
    request = turn("a", words(56, 600))
    for _ in range(4):
        memory = RamStore(300_000, recurrent=recurrent)
        store = Tiered(memory, SsdStore(tmp_path / "cache", 1 << 30, recurrent=recurrent, disk=disk))
        serve(family, store, request)  # which compares its tokens with the cold run's
        serve(family, store, turn("b", (*words(56, 400), *words(57, 30))))
        memory.check_integrity()
        store.close()
    assert disk.num_failures > 3
