"""Random histories of a RAM store against a model that remembers every prompt and searches all of them."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mantou.cache import blocks
from mantou.cache.ram import RamStore
from mantou.protocols import CacheKey
from tests.unit import cache_rows
from tests.unit.cache_rows import KEY, OTHER, Row, check

SEEDS = st.lists(st.integers(0, 1 << 32), min_size=1, max_size=12)
SESSIONS = (None, "a", "b", "c")
Prompt = list[int]


def longest(stored: list[tuple[CacheKey, Prompt]], key: CacheKey, tokens: Prompt, *, recurrent: bool) -> int:
    """What a store without a budget must find."""
    best = 0
    for other, prompt in stored:
        shared = next(
            (i for i, (a, b) in enumerate(zip(prompt, tokens[:-1], strict=False)) if a != b),
            min(len(prompt), len(tokens) - 1),
        )
        if other == key and (not recurrent or shared == len(prompt)):
            best = max(best, shared)
    return best


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stored: list[tuple[CacheKey, Prompt]] = []
        self.prompts: list[Prompt] = [[0]]  # of two tokens, so that they share much and part often

    @initialize(
        recurrent=st.booleans(), columns=st.booleans(), max_bytes=st.sampled_from([6_000, 30_000, 1 << 30])
    )
    def start(self, recurrent: bool, columns: bool, max_bytes: int) -> None:
        self.recurrent, self.columns = recurrent, columns or not recurrent
        self.store = RamStore(max_bytes, recurrent=recurrent, max_sessions=2)
        self.forgot = False

    def _prompt(self, dice: random.Random) -> Prompt:
        """A prompt that was used before, cut and continued."""
        base = dice.choice(self.prompts[-12:])
        prompt = base[: dice.choice([len(base), dice.randint(0, len(base))])]
        prompt = [*prompt, *(dice.randint(0, 1) for _ in range(dice.randint(1, 12)))]
        self.prompts.append(prompt)
        return prompt

    @rule(seeds=SEEDS)
    def put(self, seeds: list[int]) -> None:
        for dice in map(random.Random, seeds):
            key, prompt, session = dice.choice([KEY, KEY, OTHER]), self._prompt(dice), dice.choice(SESSIONS)
            lost = 0 if self.recurrent else dice.choice([0, 0, 0, len(prompt) // 2])
            row = Row(prompt, key, self.recurrent, self.columns, first_column=lost)
            self.store.put(key, prompt, row, session)
            self.stored.append((key, prompt))
            self.forgot |= lost > 0
            self.store.check_integrity()

    @rule(seeds=SEEDS)
    def match(self, seeds: list[int]) -> None:
        for dice in map(random.Random, seeds):
            key, prompt = dice.choice([KEY, KEY, OTHER]), self._prompt(dice)
            hit = self.store.match(key, prompt, dice.choice(SESSIONS))
            best = longest(self.stored, key, prompt, recurrent=self.recurrent)
            if hit is not None:
                assert hit.num_tokens <= best
                if self.columns:
                    check(hit, prompt, key, recurrent=self.recurrent)
            counters = self.store.counters
            if not (self.forgot or counters.evictions or counters.thinned_states or counters.refused):
                assert (hit.num_tokens if hit else 0) == best
            self.store.check_integrity()

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def close(self, session: str) -> None:
        self.store.close_session(session)

    @rule(num_bytes=st.integers(1, 20_000))
    def shrink(self, num_bytes: int) -> None:
        before = self.store.stats()["prompt_cache"]["bytes"]
        freed = self.store.shrink(num_bytes)
        self.forgot |= freed > 0
        assert freed == before - self.store.stats()["prompt_cache"]["bytes"]
        assert freed >= min(num_bytes, before)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()


@pytest.mark.parametrize("block", [4, 7])
def test_random_histories(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    monkeypatch.setattr(cache_rows, "BLOCK", block)
    examples = int(os.environ.get("MANTOU_EXAMPLES", "60"))
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
