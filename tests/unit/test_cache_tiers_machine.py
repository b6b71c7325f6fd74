"""Random histories of memory and disk together, with crashes: what is found is what was computed, or nothing is.

A crash is the folder as it is in the middle of a write, opened by the next server.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mantou.cache import blocks
from mantou.cache.disk import Disk
from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from mantou.protocols import CacheKey
from tests.unit import cache_rows
from tests.unit.cache_rows import KEY, OTHER, Row, check

Prompt = list[int]
SESSIONS = (None, "a", "b")


class Stopping(Disk):
    """Stops for good at the given point of writing and removing, as a process that was killed does."""

    def __init__(self) -> None:
        self.left = -1
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def point(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.stopped.set()
            assert self.go_on.wait(30)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        def slowly() -> Iterable[bytes | memoryview]:
            for part in parts:
                self.point()
                yield part
                self.point()

        super().write(path, slowly())
        self.point()

    def remove(self, path: Path) -> None:
        self.point()
        super().remove(path)
        self.point()


class Tiers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Prompt] = [[0]]
        self.place = Path(tempfile.mkdtemp(prefix="mantou-tiers-"))
        self.number = 0

    @initialize(
        recurrent=st.booleans(),
        memory=st.sampled_from([6_000, 40_000, 1 << 30]),
        disk=st.sampled_from([8_000, 60_000, 1 << 30]),
    )
    def start(self, recurrent: bool, memory: int, disk: int) -> None:
        self.recurrent, self.sizes = recurrent, (memory, disk)
        self.open()

    def open(self) -> None:
        memory, size = self.sizes
        self.disk = Stopping()
        folder = self.place / str(self.number)
        self.store = Tiered(
            RamStore(memory, recurrent=self.recurrent, max_sessions=2),
            SsdStore(folder, size, recurrent=self.recurrent, disk=self.disk),
        )

    def _prompt(self, dice: random.Random) -> Prompt:
        base = dice.choice(self.prompts[-10:])
        prompt = base[: dice.choice([len(base), dice.randint(0, len(base))])]
        prompt = [*prompt, *(dice.randint(0, 1) for _ in range(dice.randint(1, 12)))]
        self.prompts.append(prompt)
        return prompt

    def _put(self, dice: random.Random) -> tuple[CacheKey, Prompt]:
        key, prompt = dice.choice([KEY, KEY, OTHER]), self._prompt(dice)
        self.store.put(key, prompt, Row(prompt, key, self.recurrent), dice.choice(SESSIONS))
        return key, prompt

    @rule(seed=st.integers(0, 1 << 32))
    def put(self, seed: int) -> None:
        self._put(random.Random(seed))

    @rule(seed=st.integers(0, 1 << 32))
    def put_is_found_again(self, seed: int) -> None:
        key, prompt = self._put(random.Random(seed))
        if min(self.sizes) == 1 << 30:
            assert self._found(key, [*prompt, 2]) == len(prompt)

    @rule(seed=st.integers(0, 1 << 32))
    def match(self, seed: int) -> None:
        dice = random.Random(seed)
        self._found(dice.choice([KEY, KEY, OTHER]), self._prompt(dice), dice.choice(SESSIONS))

    def _found(self, key: CacheKey, prompt: Prompt, session: str | None = None) -> int:
        ticket = self.store.prefetch(key, prompt, session)
        assert ticket.wait(30)
        hit = self.store.match(key, prompt, session)
        ticket.close()
        if hit is None:
            return 0
        check(hit, prompt, key, recurrent=self.recurrent)
        return hit.num_tokens

    @rule(num_bytes=st.integers(1, 30_000))
    def shrink(self, num_bytes: int) -> None:
        self.store.shrink(num_bytes)

    @rule()
    def evict_all_of_memory(self) -> None:
        self.store.memory.shrink(1 << 40)
        assert self.store.stats()["prompt_cache"]["entries"] == 0

    @rule(session=st.sampled_from(["a", "b"]))
    def close_session(self, session: str) -> None:
        self.store.close_session(session)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @rule(seed=st.integers(0, 1 << 32), at=st.integers(1, 60))
    def crash(self, seed: int, at: int) -> None:
        assert self.store.flush(30)["flushed"]
        known, dice = list(self.prompts[-6:]), random.Random(seed)
        self.disk.left = at
        for _ in range(3):
            self._put(dice)
        while not self.disk.stopped.wait(0.001):
            if self.store.flush(0)["flushed"]:
                break
        old = self.place / str(self.number)
        self.number += 1
        shutil.copytree(old, self.place / str(self.number))
        self.disk.go_on.set()
        self.store.close()
        shutil.rmtree(old)
        self.open()
        assert self.store.stats()["ssd_cache"]["corrupt_files"] == 0
        for prompt in known:
            self._found(KEY, [*prompt, 2])

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.place)


@pytest.mark.parametrize("block", [4])
def test_random_histories_with_crashes(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    monkeypatch.setattr(cache_rows, "BLOCK", block)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # a killed process loses no page of a live system
    run_state_machine_as_test(
        Tiers,
        settings=settings(
            max_examples=int(os.environ.get("MANTOU_EXAMPLES", "30")),
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
