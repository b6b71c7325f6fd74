"""Turns one GGUF file into an MLX model folder. Knows no cache, no lock and no network: the caller owns the folder.

Q4_0, Q4_1 and Q8_0 matrices are repacked and F16/BF16 matrices copied, so every number equals the file's. Vectors
(norms, biases) become float32: they are tiny, and everything may be added to float32.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mantou.errors import ModelError
from mantou.models.hub.gguf import architecture as arch
from mantou.models.hub.gguf.blocks import (
    GROUP_SIZE,
    bfloat16_bits,
    dequantize,
    float16_values,
    repack,
)
from mantou.models.hub.gguf.metadata import Metadata
from mantou.models.hub.gguf.reader import GgufFile, TensorInfo, TensorType
from mantou.models.hub.gguf.tokenizer import end_ids, special_id, write_tokenizer

CONVERTER_VERSION = 1  # raise it when the folders come out differently: they are then converted again
_SHARD_BYTES = 2 << 30  # one shard is held in memory while it is built

Array = npt.NDArray[Any]
_BITS = {TensorType.Q4_0: 4, TensorType.Q4_1: 4, TensorType.Q8_0: 8}


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to one tensor: `heads` > 0 puts rotary rows back in order, `offset` is taken off the values."""

    source: TensorInfo
    name: str
    heads: int
    offset: float

    @property
    def bits(self) -> int | None:
        """Bits a value for a repacked matrix, else None."""
        return _BITS.get(self.source.type) if len(self.source.shape) == 2 else None

    @property
    def num_bytes(self) -> int:
        """Size in the folder."""
        num = math.prod(self.source.shape)
        if self.bits is not None:
            return num * self.bits // 8 + num // GROUP_SIZE * 8
        half = len(self.source.shape) == 2 and self.source.type in (TensorType.F16, TensorType.BF16)
        return num * (2 if half else 4)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array as safetensors writes it; `dtype` is its safetensors name, since numpy has no bfloat16."""

    name: str
    dtype: str
    data: Array


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a conversion reads and writes; a few MB of tokenizer come on top."""

    read: int
    written: int


def measure(path: Path) -> Sizes:
    """What `convert` would do to the file, from its header alone. Raises ModelError as `convert` does."""
    with GgufFile(path) as file:
        steps = _plan(file, Metadata(file.metadata, path.name))[1]
        return Sizes(sum(step.source.num_bytes for step in steps), sum(step.num_bytes for step in steps))


def convert(
    path: Path, folder: Path, advance: Callable[[int], None], *, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Fills the existing, empty `folder` from the GGUF file at `path`.

    `advance(n)` is called with the bytes of the file that were used up; a shard is at most `shard_bytes` or one
    tensor. Raises ModelError for a file that cannot be
    converted and OSError where the disk fails; the folder is then incomplete.
    """
    with GgufFile(path) as file:
        metadata = Metadata(file.metadata, path.name)
        config, steps = _plan(file, metadata)
        write_tokenizer(metadata, folder, config["vocab_size"])
        _write_config(folder, metadata, config, steps)
        _write_weights(folder, file, list(_shards(steps, shard_bytes)), advance)


# ------------------------------------------------------------------ plan
def _plan(file: GgufFile, metadata: Metadata) -> tuple[arch.Config, list[Step]]:
    architecture = arch.find(metadata)
    num_parts = metadata.integer("split.count", 1)
    if num_parts > 1:
        raise metadata.error(
            f"it is one of {num_parts} parts of a model (llama-gguf-split --merge joins them)"
        )
    shapes = {name: info.shape for name, info in file.tensors.items()}
    factors = None
    if arch.ROPE_FACTORS in file.tensors:
        factors = (
            dequantize(file.read(arch.ROPE_FACTORS), file.tensors[arch.ROPE_FACTORS].type).ravel().tolist()
        )
    config = arch.build_config(architecture, metadata, shapes, factors)
    steps = [
        _step(architecture, config, metadata, info)
        for name, info in file.tensors.items()
        if name != arch.ROPE_FACTORS
    ]
    return config, steps


def _step(architecture: arch.Architecture, config: arch.Config, metadata: Metadata, info: TensorInfo) -> Step:
    name = architecture.mlx_name(info.name)
    if name is None:
        raise metadata.error(f"tensor {info.name} is not known for architecture {architecture.name}")
    shape = architecture.shape(info.name, config)
    if info.shape != shape:
        raise metadata.error(f"tensor {info.name} has shape {list(info.shape)} where {list(shape)} is right")
    heads = architecture.rotary_heads(info.name, config)
    is_norm = info.name.endswith("norm.weight")
    return Step(info, name, heads, architecture.norm_offset if is_norm else 0.0)


# ------------------------------------------------------------------ weights
def _write_weights(
    folder: Path, file: GgufFile, shards: list[list[Step]], advance: Callable[[int], None]
) -> None:
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = (
            "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        tensors: list[Tensor] = []
        for step in shard:
            with np.errstate(invalid="ignore"):  # values that are no numbers are found below
                made = _tensors(step, file.read(step.source.name))
            if not all(_is_finite(tensor) for tensor in made):
                raise ModelError(
                    f"{file.path.name} is corrupt: tensor {step.source.name} has values without a number."
                )
            tensors += made
            advance(step.source.num_bytes)
        _save(folder / name, tensors)
        where.update((tensor.name, name) for tensor in tensors)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(step.num_bytes for shard in shards for step in shard)},
            "weight_map": where,
        }
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(steps: list[Step], shard_bytes: int) -> Iterator[list[Step]]:
    shard: list[Step] = []
    size = 0
    for step in steps:
        if shard and size + step.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(step)
        size += step.num_bytes
    yield shard


def _tensors(step: Step, blocks: npt.NDArray[np.uint8]) -> list[Tensor]:
    kind = step.source.type
    if len(step.source.shape) == 1:
        values = dequantize(blocks, kind)[0]
        return [Tensor(step.name, "float32", values - np.float32(step.offset) if step.offset else values)]
    if step.heads:
        blocks = blocks[_rotary_order(blocks.shape[0], step.heads)]
    if step.bits is not None:
        packed = repack(blocks, kind)
        stem = step.name.removesuffix(".weight")
        return [
            Tensor(step.name, "uint32", packed.weight),
            Tensor(f"{stem}.scales", "float32", packed.scales),
            Tensor(f"{stem}.biases", "float32", packed.biases),
        ]
    if kind is TensorType.F16:
        return [Tensor(step.name, "float16", float16_values(blocks))]
    if kind is TensorType.BF16:
        return [Tensor(step.name, "bfloat16", bfloat16_bits(blocks))]
    return [Tensor(step.name, "float32", dequantize(blocks, kind))]


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == "bfloat16":
        return not bool(((tensor.data & np.uint16(0x7F80)) == 0x7F80).any())
    return tensor.dtype == "uint32" or bool(np.isfinite(tensor.data).all())


def _rotary_order(num_rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Row indices that undo llama.cpp's order: it pairs row i of a head with row i + half, MLX keeps halves apart."""
    pairs = np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _save(path: Path, tensors: list[Tensor]) -> None:
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # Not through mlx: its arrays belong to the thread that made them, and this runs on any thread.
    dense = {tensor.name: (tensor.dtype, np.ascontiguousarray(tensor.data)) for tensor in tensors}
    specs = {
        name: TensorSpec(dtype=dtype, shape=list(data.shape), data_ptr=data.ctypes.data, data_len=data.nbytes)
        for name, (dtype, data) in dense.items()
    }
    try:
        serialize_file(specs, path, metadata={"format": "mlx"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


# ------------------------------------------------------------------ config
def _write_config(folder: Path, metadata: Metadata, config: arch.Config, steps: list[Step]) -> None:
    ends = end_ids(metadata)
    ids = {"bos_token_id": special_id(metadata, "bos"), "pad_token_id": special_id(metadata, "padding")}
    known: dict[str, Any] = {key: token for key, token in ids.items() if token is not None}
    if ends:
        known["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    quantization = _quantization(steps)
    if quantization is not None:
        known["quantization"] = known["quantization_config"] = quantization
    _write_json(folder / "config.json", {**config, **known, "torch_dtype": _dtype(steps)})
    tokens = {key: known[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in known}
    _write_json(folder / "generation_config.json", tokens)


def _quantization(steps: list[Step]) -> dict[str, Any] | None:
    """mlx-lm's description: the most frequent width, and the layers that differ from it by name."""
    bits = {step.name.removesuffix(".weight"): step.bits for step in steps if step.bits is not None}
    if not bits:
        return None
    main = Counter(bits.values()).most_common(1)[0][0]
    others = {
        name: {"group_size": GROUP_SIZE, "bits": width} for name, width in bits.items() if width != main
    }
    return {"group_size": GROUP_SIZE, "bits": main, "mode": "affine", **others}


def _dtype(steps: list[Step]) -> str:
    """The dtype of the unpacked matrices; a wholly packed model computes in the float32 of its scales."""
    kinds = Counter(step.source.type for step in steps if len(step.source.shape) == 2 and step.bits is None)
    names = {TensorType.F16: "float16", TensorType.BF16: "bfloat16"}
    return names.get(kinds.most_common(1)[0][0], "float32") if kinds else "float32"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
