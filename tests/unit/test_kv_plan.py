"""What schemes promise: which layer takes which codec, and bytes that are those of the arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.errors import ConfigError
from mantou.kv.batch import capacity_bucket
from mantou.kv.budget import KVBudget, kv_limit
from mantou.kv.codecs import make_scheme
from mantou.kv.plan import KVPlan
from mantou.kv.shapes import LayerShape
from mantou.models.load import LoadedModel, describe
from mantou.models.runner import Runner
from mantou.protocols import Group
from tests.compose.families import tiny
from tests.compose.harness import capabilities, model, scheme


def full(layer: int, head_dim: int = 64, **more: Any) -> LayerShape:
    return LayerShape(layer, "full", (2, head_dim), (2, head_dim), itemsize=2, **more)


def plan_of(name: str, *shapes: LayerShape, **options: Any) -> KVPlan:
    return make_scheme(name, **options).plan(shapes or [full(0)])


# ------------------------------------------------------------------ bytes
@pytest.mark.parametrize("codec", ["off", "turbo", "mixed", "8@64"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "deepseek_v32", "falcon_h1", "llama4"])
def test_bytes_of_a_row_are_those_of_the_arrays(family: str, codec: str) -> None:
    fill_and_weigh(model(family), codec)


@pytest.mark.parametrize("codec", ["off", "8", "turbo", "4@64"])
def test_bytes_of_a_row_of_half_precision_are_those_of_the_arrays(codec: str) -> None:
    module = tiny("llama")
    module.set_dtype(mx.bfloat16)
    fill_and_weigh(describe(module, {}, capabilities("llama")), codec)


def fill_and_weigh(loaded: LoadedModel, codec: str) -> None:
    runner = Runner(loaded, scheme(codec), max_width=64, ring_slack=64)
    runner.kv.resize(1)
    for _ in range(4):  # 256 tokens fill their capacity and every ring
        group = Group(0, 64, (64,))
        runner.forward(group, [[1] * 64], None)
        runner.launch(None)
        runner.kv.commit(group, (64,))
    runner.wait()
    assert runner.plan.row_bytes(256, runner.ring_slack) == pytest.approx(runner.kv.nbytes, rel=0.02)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("name", "least"), [("8", 1.8), ("4", 2.5), ("turbo", 2.5), ("turbo-k4v2", 4.5)])
def test_schemes_save_what_they_are_for_with_their_scales(name: str, least: float, head_dim: int) -> None:
    native = plan_of("off", full(0, head_dim)).token_bytes()
    assert native / plan_of(name, full(0, head_dim)).token_bytes() >= least


def test_a_window_stops_growing_and_a_state_does_not_grow() -> None:
    shapes = [full(0), full(1, num_columns=100), LayerShape(2, "recurrent", state_bytes=1000)]
    plan = plan_of("off", *shapes)
    assert plan.row_bytes(1000, 12) == 512 * (1000 + 112) + 1000


# ------------------------------------------------------------------ kv_config.json
def config(tmp_path: Path, content: Any) -> Path:
    (tmp_path / "kv_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_a_checkpoints_own_bits_are_taken_by_layer(tmp_path: Path) -> None:
    entries = [
        {"layer_idx": 0, "bits": 8, "group_size": 32},
        {"layer_idx": 2, "bits": 4},
        {"layer_idx": 3, "bits": 0},
    ]
    plan = make_scheme("config", config(tmp_path, entries)).plan([full(i) for i in range(5)])
    assert [codec.name for codec in plan.codecs] == ["kv8g32", "native", "kv4", "native", "native"]
    assert plan.name == "mixed (kv_config.json)"
    assert plan.counts == {"kv8g32": 1, "kv4": 1, "native": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ({"layer_idx": 0, "bits": 8}, "is not a list of layers"),
        ([{"layer_idx": 0, "bits": 7}], "bits 0 .native. or one of 2, 3, 4, 5, 6, 8"),
        ([{"layer_idx": -1, "bits": 8}], "layer_idx from 0"),
        ([{"layer_idx": 0, "bits": 8, "group_size": 48}], "group_size 32, 64, 128"),
        ([3], "holds 3; an entry is"),
        ([{"layer_idx": 0, "bits": 8}, {"layer_idx": 0, "bits": 4}], "names layer 0 twice"),
    ],
)
def test_a_wrong_kv_config_is_one_sentence(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheme("config", config(tmp_path, content))


def test_bits_for_a_layer_without_keys_are_not_dropped_silently(tmp_path: Path) -> None:
    made = make_scheme("config", config(tmp_path, [{"layer_idx": 1, "bits": 8}]))
    with pytest.raises(ConfigError, match="gives bits to layer 1, which keeps no keys and values"):
        made.plan([full(0), LayerShape(1, "recurrent", state_bytes=8)])


def test_config_without_its_file_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs kv_config.json in .*, and there is none; use --kv-quant 8 or 4"
    ):
        make_scheme("config", tmp_path)


# ------------------------------------------------------------------ names and keys
def test_whatever_changes_the_numbers_changes_the_cache_key(tmp_path: Path) -> None:
    config(tmp_path, [{"layer_idx": 0, "bits": 8}])
    plans = [
        plan_of("off"),
        plan_of("8"),
        plan_of("4"),
        plan_of("8", group_size=32),
        plan_of("8", start=5),
        plan_of("8", start=6),
        plan_of("turbo"),
        plan_of("turbo-k4v2"),
        make_scheme("config", tmp_path).plan([full(0), full(1)]),
    ]
    assert len({plan.key for plan in plans}) == len(plans)


@pytest.mark.parametrize(("name", "start"), [("off", 5), ("8", -1)])
def test_a_threshold_without_a_scheme_is_refused(name: str, start: int) -> None:
    with pytest.raises(ConfigError, match="needs --kv-quant and a number of tokens from 0"):
        make_scheme(name, start=start)


def test_a_group_size_that_mlx_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 32 or 64, not 48"):
        make_scheme("8", group_size=48)


def test_a_head_dimension_that_a_codec_cannot_store_is_refused_before_the_model_serves() -> None:
    with pytest.raises(ConfigError, match="a head dimension divisible by 32, this model has 80"):
        plan_of("8", full(0, 80))


# ------------------------------------------------------------------ budgets
@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=9),
    more=st.integers(1, 5000),
    limit=st.integers(1, 1 << 26),
)
def test_rows_that_fit_are_paid_for_by_the_longest_and_one_more_never_costs_less(
    lengths: list[int], more: int, limit: int
) -> None:
    budget = KVBudget(plan_of("8"), limit, slots=lambda count: count, slack=0)
    assert budget.bytes_of([*lengths, more]) >= budget.bytes_of(lengths)
    longest = budget.longest(5000)
    assert not longest or budget.fits([longest])
    assert longest == 5000 or not budget.fits([longest + 1])
    if lengths:
        row = budget.plan.row_bytes(capacity_bucket(max(lengths)))
        assert budget.bytes_of(lengths) == len(lengths) * row


def test_no_budget_fits_everything() -> None:
    assert KVBudget(plan_of("off"), None, slots=lambda count: count, slack=0).fits([1 << 40] * 99)


def test_a_memory_budget_leaves_for_keys_and_values_what_weights_and_a_chunk_do_not_take() -> None:
    assert kv_limit(None, None, weights_bytes=5, chunk=512) is None
    assert kv_limit(7, None, weights_bytes=5, chunk=512) == 7
    assert kv_limit(None, 10**9, weights_bytes=10**8, chunk=100) == 845_000_000
    assert kv_limit(10**6, 10**9, weights_bytes=10**8, chunk=100) == 10**6
    assert kv_limit(None, 10**9, weights_bytes=10**8, chunk=100, draft_bytes=10**8) == 745_000_000
    with pytest.raises(
        ConfigError, match=r"--memory-budget is 1\.00 GB, but the weights take 2\.00 GB and a"
    ):
        kv_limit(None, 10**9, weights_bytes=2 * 10**9, chunk=100)
    with pytest.raises(
        ConfigError, match=r"those that draft 0\.90 GB and a .* raise it or serve without"
    ) as error:
        kv_limit(None, 10**9, weights_bytes=10**8, chunk=100, draft_bytes=9 * 10**8)
    assert str(error.value).count(". ") == 0
