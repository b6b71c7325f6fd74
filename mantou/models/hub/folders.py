"""What a model folder is: which files belong to it, and whether it is whole. Knows no network and no formats."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

from mantou.errors import ModelError

# Data only: never .py (remote code), .bin or .pt (pickles).
MODEL_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
# Second copies of the weights, and whatever lies in sub-folders (ONNX, other frameworks).
OTHER_FILES = ("consolidated*.safetensors", "*/*")


# How an embedding model pools lies in a folder that modules.json names.
POOLING_FILES = ("*_Pooling/config.json",)


def is_pooling_file(name: str) -> bool:
    """Whether a file, named relative to the model's folder, says how its vectors are pooled."""
    return any(fnmatch(name, want) for want in POOLING_FILES) and name.count("/") == 1


def is_model_file(name: str) -> bool:
    """Whether a file of this name may be fetched or copied as part of a model."""
    return any(fnmatch(name, want) for want in MODEL_FILES) and not any(
        fnmatch(name, no) for no in OTHER_FILES
    )


def missing_file(folder: Path) -> str | None:
    """The first file that a whole MLX model folder needs and `folder` lacks; None if it is whole."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return next((name for name in _shard_names(index) if not (folder / name).is_file()), None)
    return None if any(folder.glob("model*.safetensors")) else "model.safetensors"


def check_folder(folder: Path) -> Path:
    """`folder` itself, if it is a whole model folder; raises ModelError that names the missing file."""
    missing = missing_file(folder)
    if missing is not None:
        raise ModelError(
            f"{folder} is not a whole model folder: it has no {missing}; download or copy it again."
        )
    return folder


def copy_model(source: Path, target: Path) -> None:
    """Copies the model files of `source` (of its sub-folders only how to pool) into the existing folder `target`."""
    for path in sorted(source.iterdir()):
        if path.is_file() and is_model_file(path.name):
            shutil.copyfile(path, target / path.name)
    for path in sorted(source.glob(POOLING_FILES[0])):
        own = target / path.parent.name
        own.mkdir(exist_ok=True)
        shutil.copyfile(path, own / path.name)


def _shard_names(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} is corrupt; download or copy the file again.") from None
    return sorted(str(name) for name in names)
