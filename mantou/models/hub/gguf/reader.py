"""Reads GGUF v2/v3: metadata, the tensor table, raw tensor bytes. Knows no architecture and no tokenizer.

A GGUF file is little-endian: magic, version, counts, key/value pairs, tensor table, padding, tensor data.
Source of the layout: ggml's docs/gguf.md. Every count, length and offset is checked against the size of the
file before it is used, so that a cut or corrupt file ends in a ModelError and never in a huge allocation.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mantou.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MIN_PAIR_BYTES = 8 + 4 + 1  # key length, value type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dims, one dim, type, offset


class TensorType(IntEnum):
    """The tensor types that are read; the value is ggml's number."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


# (values per block, bytes per block)
BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q8_0: (32, 34),
}

# Only to name a type that is refused.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in row-major order, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata`, `tensors`, and `read(name)` for the bytes. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not GGUF v2/v3, is cut off, or holds a tensor type that is not read."""
        self.path = path
        try:
            self._size = path.stat().st_size
            self._file: BufferedReader = path.open("rb")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        try:
            self.metadata, self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """uint8[rows, blocks, bytes per block] of one tensor; a vector is one row."""
        info = self.tensors[name]
        raw = np.empty(info.num_bytes, np.uint8)
        try:
            self._file.seek(info.offset)
            num_read = self._file.readinto(raw.data)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}.") from error
        if num_read != info.num_bytes:
            raise self._broken(f"tensor {name} is cut off")
        rows = math.prod(info.shape[:-1])
        return raw.reshape(rows, -1, BLOCKS[info.type][1])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------- header
    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._take(4) != b"GGUF":
            raise ModelError(
                f"{self.path.name} is not a GGUF file; give a .gguf file or an MLX model folder."
            )
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path.name} is GGUF version {version}, and versions 2 and 3 (little-endian) are read; "
                "convert the model again with a current llama.cpp."
            )
        num_tensors = self._count("<Q", _MIN_TENSOR_BYTES)
        num_pairs = self._count("<Q", _MIN_PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind, depth=0)
        table = [self._tensor_entry() for _ in range(num_tensors)]
        return metadata, self._place(table, metadata.get("general.alignment", 32))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {num_dims} dimensions")
        dims = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _place(
        self, table: list[tuple[str, tuple[int, ...], int, int]], alignment: object
    ) -> dict[str, TensorInfo]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}")
        base = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in table:
            type_ = self._tensor_type(name, kind)
            per_block, block_bytes = BLOCKS[type_]
            if name in tensors or min(shape) < 1 or shape[-1] % per_block or offset % alignment:
                raise self._broken(f"the table entry of tensor {name!r} is not valid")
            num_bytes = math.prod(shape) // per_block * block_bytes
            if base + offset + num_bytes > self._size:
                raise self._broken(f"tensor {name} ends beyond the end of the file")
            tensors[name] = TensorInfo(name, shape, type_, base + offset, num_bytes)
        return tensors

    def _tensor_type(self, name: str, kind: int) -> TensorType:
        try:
            return TensorType(kind)
        except ValueError:
            known = ", ".join(type_.name for type_ in TensorType)
            raise ModelError(
                f"{self.path.name}: tensor {name} has type {_OTHER_TYPES.get(kind, f'number {kind}')}, which is not "
                f"converted; use a file with {known} tensors only, or an MLX version of the model."
            ) from None

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise self._broken(f"unknown metadata type {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, depth: int) -> list[Any]:
        if depth > 2:
            raise self._broken("metadata arrays are nested too deeply")
        (kind,) = self._unpack("<I")
        if kind == _STRING:
            return [self._string() for _ in range(self._count("<Q", 8))]
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(self._count("<Q", 12))]
        if kind not in _SCALARS:
            raise self._broken(f"unknown metadata type {kind}")
        code = _SCALARS[kind]
        num = self._count("<Q", struct.calcsize(code))
        return list(self._unpack(f"<{num}{code}"))

    # -------------------------------------------------------------- bytes
    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self._file.tell():
            raise self._broken("it ends in the middle of the header")
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._broken("it ends in the middle of the header")
        return data

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _count(self, layout: str, item_bytes: int) -> int:
        """A number of items that the rest of the file can hold at all."""
        (num,) = self._unpack(layout)
        if num * item_bytes > self._size - self._file.tell():
            raise self._broken("it names more entries than it can hold")
        return int(num)

    def _string(self) -> str:
        data = self._take(self._count("<Q", 1))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self._broken("a text in its header is not UTF-8") from None

    def _broken(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path.name} is corrupt or cut off ({what}); download or copy the file again."
        )
