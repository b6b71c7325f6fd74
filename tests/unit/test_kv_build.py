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
from mantou.kv.budget import TRANSIENT_BYTES
from mantou.protocols import Load
from tests.compose.heads import assistant_folder, eagle_folder
from tests.real import TINY_CONTEXT, tiny_folder
from tests.unit.test_heads_build import model_folder

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


@pytest.mark.parametrize("paged", ["off", "on"])
def test_what_a_draft_model_keeps_of_the_rows_counts(folder: Path, tmp_path: Path, paged: str) -> None:
    """The model drafts for itself, so half as many tokens fit; rows that do not fit together wait."""
    drafts: dict[str, Any] = {"draft_model": str(folder), "cache_dir": tmp_path / "models"}
    budget = {"kv_budget_bytes": 1024 * TOKEN, "paged_kv": paged}
    _, alone = loaded(folder, **budget)
    step, info = loaded(folder, **budget, **drafts)
    assert info.extra["draft_kv_bytes_per_token"] == info.extra["kv_bytes_per_token"] == TOKEN
    assert alone.context_length > info.context_length >= alone.context_length // 2 - 128
    assert f"a token takes {2 * TOKEN / 1024:.0f} KiB" in str(info.extra["context_reason"])
    length = info.context_length
    waiting = [Load(f"w{i}", -1, length, 8, length) for i in range(2)]
    assert step.axes.scheduler.plan(waiting, (), 512).admit == ("w0",)


def test_rows_wait_for_the_room_that_drafts_take(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "prompt_cache_bytes": 0,
        "batch": 4,
        "draft_model": str(folder),
        "cache_dir": tmp_path / "models",
    }
    chats = ["one", "two", "three", "four"]
    with mantou.load(str(folder), prompt_cache_bytes=0, batch=4) as free:
        expected = [answer.text for answer in free.batch(chats, max_tokens=12)]
    with mantou.load(str(folder), kv_budget_bytes=256 * TOKEN, paged_kv="off", **options) as bound:
        assert [answer.text for answer in bound.batch(chats, max_tokens=12)] == expected


def test_a_head_counts_and_an_assistant_keeps_nothing(tmp_path: Path) -> None:
    for kind, writer, kept in (("eagle", eagle_folder, 2 * 2 * 16 * 4), ("assistant", assistant_folder, 0)):
        model = model_folder("gemma4_text", tmp_path / f"{kind} model")
        head = writer("gemma4_text", tmp_path / kind)
        _, info = loaded(model, draft_model=str(head), cache_dir=tmp_path / "models")
        assert info.extra["draft_kv_bytes_per_token"] == kept


def test_the_weights_of_a_draft_model_and_of_a_head_count_in_the_memory_budget(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path / "models", "paged_kv": "off"}
    model, head = model_folder("llama", tmp_path / "model"), eagle_folder("llama", tmp_path / "head")
    for target, draft in ((folder, folder), (model, head)):
        _, alone = loaded(target, **options)
        _, helped = loaded(target, draft_model=str(draft), **options)
        more = helped.extra["draft_weights_bytes"]
        assert alone.extra["draft_weights_bytes"] == 0
        assert more == alone.weights_bytes if draft == target else 0 < more < alone.weights_bytes
        room = 320 * (helped.extra["kv_bytes_per_token"] + helped.extra["draft_kv_bytes_per_token"])
        budget = int(alone.weights_bytes + more + 512 * TRANSIENT_BYTES + room)
        _, bound = loaded(target, draft_model=str(draft), memory_budget_bytes=budget, **options)
        assert 0 < bound.context_length <= 320


def test_a_memory_budget_that_a_draft_model_fills_is_one_sentence_with_numbers(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "cache_dir": tmp_path / "models",
        "paged_kv": "off",
        "draft_model": str(folder),
    }
    _, info = loaded(folder, **options)
    budget = 2 * info.weights_bytes + 512 * TRANSIENT_BYTES - 1
    with pytest.raises(ConfigError, match=r"those that draft .* GB .* serve without drafts") as error:
        loaded(folder, memory_budget_bytes=budget, **options)
    assert str(error.value).count(". ") == 0
