"""Small model folders with real weights, tokenizer and chat template. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mantou.models.load import build
from tests.compose.family_configs.base import config
from tests.unit import chat_folders

LLAMA: Mapping[str, Any] = config("llama", vocab_size=512, max_position_embeddings=256)


def weights(
    settings: Mapping[str, Any] = LLAMA, *, dtype: mx.Dtype = mx.float32, bits: int = 0
) -> dict[str, mx.array]:
    """Random weights as a checkpoint names them, quantised if `bits` are given."""
    state = mx.random.state
    mx.random.seed(0)
    module = build(settings["model_type"], settings)
    module.set_dtype(dtype)
    if bits:
        nn.quantize(module, group_size=32, bits=bits)
    found = dict(tree_flatten(module.parameters()))
    mx.eval(found)
    assert state is mx.random.state
    return found


def write_model(folder: Path, settings: Mapping[str, Any] = LLAMA, **options: Any) -> Path:
    """config.json and model.safetensors; `bits` adds the quantisation to the config."""
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights(settings, **options))
    quantized = {"quantization": {"group_size": 32, "bits": options["bits"]}} if options.get("bits") else {}
    (folder / "config.json").write_text(json.dumps({**settings, **quantized}), encoding="utf-8")
    return folder


def write_chat_model(folder: Path) -> Path:
    """A model that `mantou.load` takes."""
    write_model(folder)
    backend = chat_folders.byte_level()
    assert backend.get_vocab_size() <= LLAMA["vocab_size"]
    tokenizer_config = {**chat_folders.CHATML_TOKENS, "chat_template": chat_folders.CHATML}
    return chat_folders.write_folder(folder, backend, tokenizer_config=tokenizer_config)
