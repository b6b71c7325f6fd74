"""What a model folder holds: configuration and weight files, checked before anything is allocated. Knows no graph."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mantou.errors import ModelError

_MAX_HEADER = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; give a folder with an MLX model in it."
        ) from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download the model again.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json with the EOS ids of generation_config.json. Refuses code that would have to be run."""
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise ModelError(f"{folder}/config.json names no model_type; this is not a language model folder.")
    if config.get("model_file"):
        raise ModelError(
            f"{folder} wants to run its own code ({config['model_file']}); mantou never runs code from a model "
            "folder, so choose a model of a supported family."
        )
    if (folder / "generation_config.json").exists():
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:
            config["eos_token_id"] = eos
    return config


def generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def check_safetensors(path: Path) -> None:
    """Raises ModelError unless the header is sound and the file is exactly as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise ModelError(f"{path} is truncated or not a safetensors file; download the model again.")
        try:
            header = json.loads(file.read(length))
            ends = [int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ModelError(f"{path} has a corrupt header; download the model again.") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{path} has {size} bytes instead of {expected}; download the model again.")


def fingerprint(folder: Path) -> str:
    """A hash that tells one set of weights from another without reading all of it: config.json, and of each weight file
    its length, its header and 64 samples of 4 KiB.
    """
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            length = min(struct.unpack("<Q", file.read(8))[0], _MAX_HEADER)
            found.update(file.read(length))
            for i in range(64):
                file.seek(size * i // 64)
                found.update(file.read(4096))
    return found.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The checked safetensors files of a folder."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
            raise ModelError(f"{index} does not say where the weights are; download the model again.")
        named = {folder / name for name in weight_map.values()}
        missing = sorted(path.name for path in named if not path.exists())
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}; download the model again.")
    if not files:
        raise ModelError(
            f"{folder} holds no model*.safetensors file; mantou loads safetensors and GGUF only."
        )
    for path in files:
        check_safetensors(path)
    return files
