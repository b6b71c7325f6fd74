"""What a prompt cache gives back is what was computed: every turn equals its cold run, and costs only what is new."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from mantou.cache.ram import RamStore
from mantou.data import Request, Sampling
from mantou.engine.prefix import MIN_REUSED
from mantou.models import runner as runner_module
from mantou.protocols import PrefixStore
from mantou.spec.none import NoDraft
from tests.compose.harness import VOCAB, Case, Outcome, make_step, model, run
from tests.fakes import NoisyOracle

FAMILIES = ("llama", "gemma3_text", "gemma4_text", "qwen3_5", "mamba2")
RECURRENT = ("qwen3_5", "mamba2")
WINDOWED = ("gemma3_text", "gemma4_text")
NEW = 12  # generated tokens a turn


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of window + 64 columns, so that prompts of a few hundred tokens wrap them several times."""
    monkeypatch.setattr(runner_module, "RING_SLACK", 64)


def words(seed: int, count: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(VOCAB) for _ in range(count))


def turn(name: str, prompt: Sequence[int], session: str | None = None, sampled: bool = False) -> Request:
    sampling = Sampling(temperature=0.9, seed=7) if sampled else Sampling()
    return Request(name, tuple(prompt), sampling, max_tokens=NEW, session=session)


def cold(family: str, request: Request, codec: str = "off") -> list[int]:
    return _cold(family, request.prompt, request.sampling, codec)


@cache
def _cold(family: str, prompt: tuple[int, ...], sampling: Sampling, codec: str) -> list[int]:
    case = Case(family, chunk=64, codec=codec)
    return run(case, [Request("cold", prompt, sampling, max_tokens=NEW)]).tokens["cold"]


def cached_tokens(outcome: Outcome, name: str) -> int:
    return next(e.usage.cached_tokens for e in outcome.events if e.request_id == name and e.usage)


def serve(
    family: str, store: PrefixStore, request: Request, *, codec: str = "off", **changes: Any
) -> tuple[list[int], int]:
    """One request on a warm store: its tokens, which must be those of a cold run, and how many were cached."""
    outcome = run(Case(family, chunk=64, codec=codec, store=store, **changes), [request])
    assert not [event.error for event in outcome.events if event.error]
    assert outcome.tokens[request.id] == cold(family, request, codec)
    return outcome.tokens[request.id], cached_tokens(outcome, request.id)


def new_store(family: str, max_bytes: int = 1 << 30) -> RamStore:
    return RamStore(max_bytes, recurrent=family in RECURRENT)


def state_before(family: str, parts_at: int, states: Sequence[int]) -> int:
    """Where a hit ends: at the token where prompts part, for recurrent models at the deepest state before it."""
    if family not in RECURRENT:
        return parts_at
    return max((state for state in states if state <= parts_at), default=0)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_turn_reuses_the_first_and_its_answer(family: str, sampled: bool) -> None:
    store, prompt, held = new_store(family), words(1, 300), 0
    for number in range(4):
        request = turn(f"t{number}", prompt, "chat", sampled)
        answer, cached = serve(family, store, request)
        store.check_integrity()
        assert cached == held
        held = len(prompt) + len(answer) - 1  # the last token was drawn, not fed
        prompt = (*prompt, *answer, *words(100 + number, 30))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_prompt_computes_one_token(family: str) -> None:
    store, request = new_store(family), turn("r", words(2, 300))
    assert serve(family, store, request)[1] == 0
    assert serve(family, store, request)[1] == 299
    store.check_integrity()


@pytest.mark.parametrize("parts_at", [MIN_REUSED - 1, MIN_REUSED, 64, 200, 255, 257, 305])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_at_any_point_equals_its_cold_run(family: str, parts_at: int) -> None:
    store, first = new_store(family), turn("a", words(3, 300))
    answer, _ = serve(family, store, first)
    whole = (*first.prompt, *answer)
    branch = turn("b", (*whole[:parts_at], (whole[parts_at] + 1) % VOCAB, *words(4, 40)))
    _, cached = serve(family, store, branch)
    store.check_integrity()
    reused = state_before(family, parts_at, states=(256, 299, 311))
    assert cached == (reused if reused >= MIN_REUSED else 0)
    assert serve(family, store, turn("c", (*whole, 1, 2)))[1] == 311


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_history_is_not_taken_for_the_old_one(family: str) -> None:
    store, prompt = new_store(family), words(5, 280)
    answer, _ = serve(family, store, turn("a", prompt, "s"))
    edited = [*prompt, *answer, *words(6, 40)]
    edited[130] = (edited[130] + 1) % VOCAB
    _, cached = serve(family, store, turn("b", edited, "s"))
    assert cached == state_before(family, 130, states=(256, 279, 291))
    assert store.counters.session_misses == 2
    store.check_integrity()


@pytest.mark.parametrize("codec", ["8", "4"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_packed_columns_come_back_as_they_were(family: str, codec: str) -> None:
    store, prompt = new_store(family), words(7, 150)
    answer, _ = serve(family, store, turn("a", prompt), codec=codec)
    _, cached = serve(family, store, turn("b", (*prompt, *answer, 1, 2, 3)), codec=codec)
    assert cached == 161
    assert serve(family, store, turn("c", prompt), codec=codec)[1] == 149


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_row_stores_everything_before_its_rings_forget_it(family: str) -> None:
    store = new_store(family)
    serve(family, store, turn("a", words(8, 900)), bucketed=True)
    for parts_at in (100, 400, 700, 890):
        _, cached = serve(family, store, turn(f"b{parts_at}", (*words(8, 900)[:parts_at], *words(9, 20))))
        assert cached >= parts_at - (256 + 64 if family in RECURRENT else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_eviction_while_rows_run_never_gives_wrong_tokens(family: str) -> None:
    """The budget holds about one of six prompts, so blocks go while the rows that stored them still run."""
    shared = words(10, 200)
    wanted = [turn(f"r{i}", (*shared[: 90 * i], *words(20 + i, 300)), f"s{i % 2}") for i in range(4)]
    size = new_store(family)
    serve(family, size, wanted[0])
    store = new_store(family, int(size.stats()["prompt_cache"]["bytes"] * 1.2))
    for _ in range(2):
        outcome = run(Case(family, rows=3, chunk=64, store=store), wanted, {"r1": 2, "r2": 4, "r3": 5})
        store.check_integrity()
        for request in wanted:
            assert outcome.tokens[request.id] == cold(family, request)
    assert store.counters.evictions


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_rows_that_share_a_prompt_run_beside_each_other(family: str, drafts: bool) -> None:
    store, system = new_store(family), words(11, 270)
    wanted = [turn(f"r{i}", (*system, *words(30 + i, 20 + 9 * i))) for i in range(5)]
    expected = {request.id: cold(family, request) for request in wanted}
    provider = NoisyOracle(expected, 0.7, VOCAB) if drafts else NoDraft()
    case = Case(family, rows=3, chunk=64, store=store, provider=provider)
    for _ in range(2):
        outcome = run(case, wanted, {"r1": 3, "r2": 8, "r3": 9})
        assert outcome.tokens == expected
        store.check_integrity()
    for request in wanted:
        assert cached_tokens(outcome, request.id) == len(request.prompt) - 1


def test_eight_conversations_hold_little_more_than_their_shared_prompt_once() -> None:
    system = words(12, 1000)
    one, eight = new_store("llama"), new_store("llama")
    serve("llama", one, turn("one", (*system, *words(40, 10))))
    for i in range(8):
        serve("llama", eight, turn(f"r{i}", (*system, *words(40 + i, 10))))
    size = {store: store.stats()["prompt_cache"]["bytes"] for store in (one, eight)}
    assert size[eight] < 1.25 * size[one]  # 8 x 21 tokens of their own


def test_a_cancelled_prompt_keeps_what_was_computed() -> None:
    store, request = new_store("llama"), turn("a", words(13, 600))
    case = Case("llama", chunk=64, store=store)
    run(case, [request], cancel={"a": 6})
    assert serve("llama", store, request)[1] >= 256


def test_a_row_cannot_give_columns_that_its_ring_has_overwritten() -> None:
    step = make_step(Case("gemma3_text", chunk=64))
    step.submit(turn("a", words(14, 300)))
    while step.running or step.waiting:
        step.advance()
        if step.running:
            slot, length = step.running[0].slot, step.running[0].num_kv
            size = step.runner.kv.num_kept_columns
            piece = step.runner.kv.columns(slot, 0, length)
            assert size < 1000 and piece.lo >= length - size and (piece.lo == 0) == (length <= size)


def test_the_store_counts_bytes_of_the_real_model() -> None:
    store = new_store("llama")
    serve("llama", store, turn("a", words(15, 256)))
    per_token = sum(s.nbytes for s in store.match(store_key(), [*words(15, 256)]).pieces[0].stacks) / 255
    assert store.stats()["prompt_cache"]["bytes"] == pytest.approx(267 * (per_token + 4) + 2 * 1024, abs=64)
    assert model("llama").family.name == "llama"


def store_key() -> Any:
    from mantou.protocols import CacheKey

    return CacheKey("llama", (), "off", "none")
