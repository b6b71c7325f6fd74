"""What the prompt cache counts reaches Prometheus: every number of /stats, under one name, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mantou.api.prometheus import Facts, render
from mantou.cache.checkpoints import SsdCheckpoints
from mantou.cache.none import NoStore
from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from mantou.engine.timing import StepTimes
from mantou.metrics import ServerMetrics
from tests.unit.cache_rows import KEY, Row

NOT_NUMBERS = {"dir"}


def scrape(cache: Any, engine: Any = None) -> dict[str, float]:
    text = render(Facts(ServerMetrics(), engine or {}, "m", 0.0, cache)).decode()
    families = text_string_to_metric_families(text)
    return {s.name: s.value for f in families for s in f.samples if s.labels.get("model_name") == "m"}


@pytest.fixture
def stats(tmp_path: Path) -> dict[str, Any]:
    """Two prompts, a hit, a session and a restart have left something in most numbers."""
    tokens = list(range(600))
    for _ in range(2):
        store = Tiered(RamStore(1 << 20), SsdStore(tmp_path / "cache", 1 << 30))
        assert store.prefetch(KEY, tokens).wait(10)
        store.match(KEY, tokens, "s")
        store.put(KEY, tokens, Row(tokens), "s")
        store.match(KEY, tokens, "s")
        assert store.flush(10)["flushed"]
        store.close()
    return store.stats()


def test_every_number_of_the_cache_is_a_metric(stats: dict[str, Any]) -> None:
    shown = [name for name in scrape(stats) if name.startswith(("mantou_prompt_cache_", "mantou_ssd_cache_"))]
    numbers = [key for block in stats.values() for key in block if key not in NOT_NUMBERS]
    assert len(shown) == len(numbers), "a new number of /stats needs a name in prometheus_cache.py"


def test_the_values_are_those_of_stats(stats: dict[str, Any]) -> None:
    found = scrape(stats)
    memory, disk = stats["prompt_cache"], stats["ssd_cache"]
    assert found["mantou_prompt_cache_hits_total"] == memory["hits"] > 0
    assert found["mantou_prompt_cache_session_hits_total"] == memory["session_hits"] > 0
    assert found["mantou_prompt_cache_bytes"] == memory["bytes"] > 0
    assert found["mantou_ssd_cache_restores_total"] == disk["restores"] == 1
    assert found["mantou_ssd_cache_bytes"] == disk["bytes"] > 0
    assert found["mantou_ssd_cache_longest_prefix_tokens"] == 600
    assert found["mantou_ssd_cache_read_only"] == 0


def test_every_number_of_the_answers_in_progress_is_a_metric(tmp_path: Path) -> None:
    store = SsdCheckpoints(tmp_path, 16)
    stats = store.stats()
    store.close()
    shown = [name for name in scrape(stats) if name.startswith("mantou_generation_checkpoints_")]
    assert len(shown) == len(stats["generation_checkpoints"])


def test_a_tier_that_is_off_has_no_metrics() -> None:
    assert not [name for name in scrape(NoStore().stats()) if "_cache_" in name and "vllm" not in name]


def test_the_cache_s_part_of_a_step_is_told_from_the_rest() -> None:
    times = StepTimes()
    for seconds in (0.1, 0.1, 0.4):
        times.end(seconds)
    with times.store():
        pass
    assert times.end(1.0) < 1.0, "a copy is no part of the time that paces chunks"
    found = scrape({}, {"steps_timed": times.summary()})
    assert found["mantou_step_seconds_median"] == 0.25 and found["mantou_step_seconds_max"] == 1.0
    assert 0 < found["mantou_step_cache_seconds_max"] < 1.0
    assert len(times.last(2)) == 2 and times.last(2)[0][0] == 0.4


def test_the_ring_of_steps_keeps_the_newest_in_order() -> None:
    times = StepTimes()
    for number in range(5000):
        times.end(float(number))
    assert list(times.last(3)[:, 0]) == [4997.0, 4998.0, 4999.0]
    assert times.summary()["count"] == 4096 and times.last()[0][0] == 904.0
