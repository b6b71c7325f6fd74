"""What a model folder says of itself: sizes, layers, quantisation. Reads config.json and safetensors headers only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantou.errors import ModelError
from mantou.models.hub.folders import is_model_file

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself
_KV_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of one model folder; None where the config does not tell. Lengths in tokens, sizes in bytes."""

    model_type: str
    param_count: int
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context_length: int | None
    kv_bytes_per_token: int | None
    size_bytes: int
    quant_bits: int | None
    quant_group_size: int | None
    quant_mode: str | None
    vision: bool
    chat_template: bool


def inspect(folder: Path) -> Traits:
    """Looks into a whole model folder. Raises ModelError if its config.json or a weight file is corrupt."""
    config = _read_object(folder / "config.json")
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else config
    quantization = config.get("quantization")
    quantization = quantization if isinstance(quantization, dict) else {}
    return Traits(
        model_type=str(config.get("model_type", "unknown")),
        param_count=_count_parameters(folder, quantization),
        num_layers=_integer(text, "num_hidden_layers"),
        hidden_size=_integer(text, "hidden_size"),
        vocab_size=_integer(text, "vocab_size"),
        context_length=_integer(text, "max_position_embeddings"),
        kv_bytes_per_token=_kv_bytes_per_token(text),
        size_bytes=sum(path.stat().st_size for path in folder.iterdir() if is_model_file(path.name)),
        quant_bits=_integer(quantization, "bits"),
        quant_group_size=_integer(quantization, "group_size"),
        quant_mode=str(quantization.get("mode", "affine")) if quantization else None,
        vision="vision_config" in config,
        chat_template=_has_chat_template(folder),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download or copy the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download or copy the file again.")
    return value


def _integer(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_read_object(path).get("chat_template"))


# ------------------------------------------------------------------ KV
def _kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Bytes that one more token of context costs: K and V of the layers that keep the whole context."""
    heads = _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads") or heads
    hidden = _integer(config, "hidden_size")
    layers = _full_attention_layers(config)
    if heads is None or kv_heads is None or hidden is None or layers is None or "kv_lora_rank" in config:
        return None
    head_dim = _integer(config, "head_dim") or hidden // heads
    return 2 * layers * kv_heads * head_dim * _KV_ITEM_BYTES


def _full_attention_layers(config: dict[str, Any]) -> int | None:
    layers = _integer(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds.count("full_attention")
    every = _integer(config, "full_attention_interval") or _integer(config, "sliding_window_pattern")
    return layers // every if layers is not None and every else layers


# ------------------------------------------------------------------ parameters
def _count_parameters(folder: Path, quantization: dict[str, Any]) -> int:
    """Parameters before quantisation: a packed matrix counts its scales times their group size."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes.update(_shapes(path))
    total = 0
    for name, shape in shapes.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{stem}.weight" in shapes:
            continue
        scales = shapes.get(f"{stem}.scales") if part == "weight" else None
        total += math.prod(shape) if scales is None else math.prod(scales) * _group_size(quantization, stem)
    return total


def _group_size(quantization: dict[str, Any], layer: str) -> int:
    own = quantization.get(layer)
    return (
        (_integer(own, "group_size") if isinstance(own, dict) else None)
        or _integer(quantization, "group_size")
        or 64
    )


def _shapes(path: Path) -> dict[str, list[int]]:
    """Tensor shapes of a safetensors file: an 8-byte length, then a JSON object of that length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is corrupt or cut off; download or copy the file again.")
        header = file.read(length)
    try:
        table: dict[str, Any] = json.loads(header)
        table.pop("__metadata__", None)
        shapes = {name: [int(n) for n in entry["shape"]] for name, entry in table.items()}
        ends = [int(entry["data_offsets"][1]) for entry in table.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{path} is corrupt; download or copy the file again.") from None
    if 8 + length + max(ends, default=0) > size:
        raise ModelError(f"{path} is cut off; download or copy the file again.")
    return shapes
