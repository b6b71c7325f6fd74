"""`--kv-quant`, `--kv-budget` and `--memory-budget` as they meet a model folder, through the composition root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mantou
from mantou import build
from mantou.cli.card import card_lines
from mantou.config import Config
from mantou.data import ModelInfo
from mantou.engine.step import Step
from mantou.errors import ConfigError, ContextOverflow
from tests.real import TINY_CONTEXT, tiny_folder

TOKEN = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head dimension, bytes of a float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def loaded(folder: Path, **options: Any) -> tuple[Step, ModelInfo]:
    step, info = build.load_step(folder, Config(model=str(folder), prompt_cache_bytes=0, batch=4, **options))
    step.axes.store.close()
    return step, info


def test_the_card_says_which_codec_the_layers_have(folder: Path) -> None:
    (folder / "kv_config.json").write_text(json.dumps([{"layer_idx": 1, "bits": 8, "group_size": 32}]))
    _, info = loaded(folder, kv_quant="config")
    assert info.extra["kv_codecs"] == {"native": 1, "kv8g32": 1}
    card = "\n".join(card_lines(Config(model=str(folder), kv_quant="config"), info, 1))
    assert "mixed (kv_config.json): 1 native, 1 kv8g32 (2 full layers)" in card


def test_the_card_and_the_numbers_say_whether_rows_share_blocks(folder: Path) -> None:
    step, info = loaded(folder, paged_kv="on", paged_kv_block_size=32)
    assert info.extra["kv_paging"] == {"block": 32, "why": "--paged-kv on", "layers": {"full": "blocks"}}
    assert "  paging   blocks of 32 tokens (--paged-kv on)" in card_lines(Config(model=str(folder)), info, 1)
    assert step.runner.block == 32
    step, info = loaded(folder, paged_kv="off")
    assert "  paging   off (--paged-kv off)" in card_lines(Config(model=str(folder)), info, 1)
    assert step.runner.block is None


def test_a_scheme_that_the_model_cannot_take_stops_the_server_before_it_serves(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs a head dimension of 64, 128, 256, 512, this model has 32"):
        loaded(folder, kv_quant="turbo")


def test_bytes_a_token_are_the_graphs_own(folder: Path) -> None:
    assert loaded(folder)[1].extra["kv_bytes_per_token"] == TOKEN


def test_a_budget_cuts_the_context_to_the_longest_row_that_fits_alone(folder: Path) -> None:
    step, info = loaded(folder, kv_budget_bytes=640 * TOKEN, paged_kv="off")
    assert info.context_length == 640
    assert any("context 2048 -> 640 tokens" in note for note in info.notes)
    assert (
        info.extra["context_reason"] == "the budget has 0.000655 GB for keys and values, a token takes 1 KiB"
    )
    plan = step.axes.scheduler.plan
    assert step.context_length == 640
    assert plan([], [], 16).admit == ()


def test_a_budget_that_holds_the_context_changes_nothing(folder: Path) -> None:
    _, info = loaded(folder, kv_budget_bytes=10**9)
    assert info.context_length == TINY_CONTEXT
    assert "context_reason" not in info.extra


@pytest.mark.parametrize("options", [{"kv_budget_bytes": 1000}, {"memory_budget_bytes": 1000}])
def test_a_budget_that_holds_no_row_is_one_sentence_with_numbers(
    folder: Path, options: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=r"GB.*raise") as error:
        loaded(folder, **options)
    assert str(error.value).count(". ") == 0


def test_rows_beyond_the_budget_wait_and_what_can_never_fit_is_told_the_numbers(folder: Path) -> None:
    options: dict[str, Any] = {"prompt_cache_bytes": 0, "batch": 4}
    chats = ["one", "two", "three", "four"]
    with mantou.load(str(folder), **options) as free:
        expected = [answer.text for answer in free.batch(chats, max_tokens=12)]
    with mantou.load(str(folder), kv_budget_bytes=128 * TOKEN, paged_kv="off", **options) as bound:
        assert [answer.text for answer in bound.batch(chats, max_tokens=12)] == expected
        with pytest.raises(
            ContextOverflow, match=r"the context holds 128 .* .the budget has 0\.000131 GB for keys"
        ):
            bound.complete("many words " * 200)
