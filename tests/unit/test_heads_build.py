"""From flags to a running engine with a draft head: what is loaded, what the ready card says, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mantou import build
from mantou.config import Config
from mantou.data import ModelInfo, Request, Sampling
from mantou.engine.step import Step
from mantou.errors import ConfigError, ModelError
from tests.compose.families import FAMILIES, tiny
from tests.compose.heads import (
    assistant_folder,
    dflash2_folder,
    dspark_folder,
    eagle3_folder,
    eagle_folder,
    mtp_folder,
)

PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("llama", tmp_path_factory.mktemp("llama"))


def model_folder(family: str, folder: Path, own_layer: Path | None = None) -> Path:
    """A whole model, with the prediction layer of another folder if one is given."""
    weights = dict(tree_flatten(tiny(family).parameters()))
    if own_layer is not None:
        read: Any = mx.load(str(own_layer / "model.safetensors"))
        weights |= read
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps({**FAMILIES[family], "model_type": family}))
    return folder


def load(folder: Path, cache: Path, **options: Any) -> tuple[Step, ModelInfo]:
    config = Config(model=str(folder), batch=4, prompt_cache_bytes=0, cache_dir=cache, **options)
    return build.load_step(folder, config)


def answer(step: Step) -> list[int]:
    step.submit(Request("r", PROMPT, Sampling(), max_tokens=20))
    found: list[int] = []
    while step.busy:
        step.advance()
        found += [token for event in step.take_events() for token in event.tokens]
    step.land()
    found += [token for event in step.take_events() for token in event.tokens]
    step.check_integrity()
    return found


@pytest.mark.parametrize("writer", [eagle_folder, eagle3_folder, dspark_folder, dflash2_folder])
def test_a_head_is_known_by_its_weights_and_changes_no_answer(
    writer: Any, llama: Path, tmp_path: Path
) -> None:
    head = writer("llama", tmp_path / "head")
    plain, _ = load(llama, tmp_path, draft_kind="off")
    step, info = load(llama, tmp_path, draft_model=str(head))
    kind = writer.__name__.removesuffix("_folder")
    assert kind in info.extra["draft_kinds"]
    assert f"{kind} head head" in str(info.extra["drafts"])
    assert answer(step) == answer(plain)


def test_a_model_that_brings_a_prediction_layer_uses_it_without_a_flag(tmp_path: Path) -> None:
    layer = mtp_folder("qwen3_5", tmp_path / "layer")
    folder = model_folder("qwen3_5", tmp_path / "model", layer)
    step, info = load(folder, tmp_path)
    assert "the model's own prediction layer" in str(info.extra["drafts"])
    plain, said = load(folder, tmp_path, mtp=False)
    assert "mtp" not in said.extra["draft_kinds"]
    assert answer(step) == answer(plain)


def test_a_layer_that_cannot_be_read_is_said_and_is_an_error_if_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = mtp_folder("qwen3_5", tmp_path / "layer")
    read: Any = mx.load(str(layer / "model.safetensors"))
    read.pop("mtp.layers.0.self_attn.k_norm.weight")
    mx.save_safetensors(str(layer / "model.safetensors"), read)
    folder = model_folder("qwen3_5", tmp_path / "model", layer)
    with caplog.at_level(logging.WARNING):
        _, info = load(folder, tmp_path)
    assert "mtp" not in info.extra["draft_kinds"]
    assert "the model's prediction layer is not used: The prediction layer in" in caplog.text
    with pytest.raises(ModelError, match=r"does not fit its config.json \(Missing 1 parameters"):
        load(folder, tmp_path, mtp=True)


def test_mtp_without_such_a_layer_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--mtp on needs a model with a multi-token-prediction layer"):
        load(llama, tmp_path, mtp=True)


def test_a_head_of_the_wrong_kind_is_refused(llama: Path, tmp_path: Path) -> None:
    head = eagle_folder("llama", tmp_path / "head")
    with pytest.raises(ModelError, match="no draft head of the kind eagle3 but one of the kind eagle"):
        load(llama, tmp_path, draft_model=str(head), draft_kind="eagle3")


@pytest.mark.parametrize("packed", [False, True])
def test_an_assistant_reads_the_kv_of_a_model_on_this_device(packed: bool, tmp_path: Path) -> None:
    """With the building blocks of the device in both graphs."""
    folder = model_folder("gemma4_text", tmp_path / "model")
    head = assistant_folder("gemma4_text", tmp_path / "head")
    options: dict[str, Any] = {"kv_quant": "8"} if packed else {}
    plain, _ = load(folder, tmp_path, draft_kind="off", **options)
    step, info = load(folder, tmp_path, draft_model=str(head), **options)
    assert "assistant" in info.extra["draft_kinds"]
    assert "assistant head head" in str(info.extra["drafts"])
    asked: list[int] = []
    look = step.runner.kv.look
    step.runner.kv.look = lambda group, layers: (asked.append(group.lo), look(group, layers))[1]  # type: ignore[method-assign]
    assert answer(step) == answer(plain)
    assert asked
