"""The bytes of one block on disk: a safetensors file whose metadata says what it is. Knows no folder and no threads.

    8 bytes  length of the header, little endian
    header   JSON: tensors "0", "1", ... (one a stack) and __metadata__, padded with spaces to a multiple of 8
    data     the stacks one after the other

The checksum is XXH3-128 of the whole file with the checksum's own digits as zeros, so no byte is outside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from mantou.cache.blocks import Tokens, address
from mantou.kv.pieces import Stack

FORMAT = "mantou prefix block 1"
COLUMNS, STATE = "columns", "state"

_NO_CHECKSUM = b"0" * 32
# MLX's name of a dtype -> safetensors' name and the numpy dtype of the same bits
_DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("BOOL", "?"),
    "uint8": ("U8", "u1"),
    "uint16": ("U16", "<u2"),
    "uint32": ("U32", "<u4"),
    "uint64": ("U64", "<u8"),
    "int8": ("I8", "i1"),
    "int16": ("I16", "<i2"),
    "int32": ("I32", "<i4"),
    "int64": ("I64", "<i8"),
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
    "float32": ("F32", "<f4"),
    "float64": ("F64", "<f8"),
    "complex64": ("C64", "<c8"),
}


class BadBlock(ValueError):
    """A file that is not what its name says: truncated, changed, of another format, or somebody else's."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a file holds: `kind` of the prefix at `address`, whose last block begins at `lo` with `tokens`."""

    kind: str
    key: str  # blocks.key_text
    parent: bytes
    address: bytes
    lo: int
    tokens: Tokens

    @property
    def hi(self) -> int:
        return self.lo + len(self.tokens)

    @property
    def file_name(self) -> str:
        return f"{self.address.hex()}.{self.kind}.safetensors"


def encode(label: Label, stacks: Sequence[Stack]) -> list[bytes | memoryview]:
    """The file in parts, without a copy of contiguous data. Raises KeyError for a dtype that MLX does not have."""
    arrays = [np.ascontiguousarray(stack.data) for stack in stacks]
    header: dict[str, Any] = {"__metadata__": _metadata(label, stacks)}
    end = 0
    for index, (stack, array) in enumerate(zip(stacks, arrays, strict=True)):
        start, end = end, end + array.nbytes
        dtype = _DTYPES[stack.dtype][0]
        header[str(index)] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = [array.reshape(-1).view(np.uint8).data for array in arrays]
    length = len(text).to_bytes(8, "little")
    text = text.replace(_field(_NO_CHECKSUM), _field(_checksum(length, text, data)), 1)
    return [length + text, *data]


def decode(buffer: bytearray | bytes, expected: Label) -> tuple[Stack, ...]:
    """The stacks of a whole file, as views of `buffer`. Raises BadBlock unless it is exactly what is expected."""
    header, start = _parse(buffer)
    found = _label(header)
    text, data = bytes(buffer[8:start]), memoryview(buffer)[start:]
    checksum = header["__metadata__"]["checksum"].encode()
    blank = text.replace(_field(checksum), _field(_NO_CHECKSUM), 1)
    if _checksum(bytes(buffer[:8]), blank, [data]) != checksum:
        raise BadBlock("its checksum is not that of its content")
    if (found.kind, found.key, found.address) != (expected.kind, expected.key, expected.address):
        raise BadBlock("it holds another block than its name says")
    return _stacks(header, data)


def read_label(head: bytes) -> Label:
    """What a file says it is, from its first bytes. Raises BadBlock; the data is not looked at."""
    header, _ = _parse(head)
    return _label(header)


def header_bytes(head: bytes) -> int:
    """How many bytes of a file `read_label` needs, from its first 8."""
    return 8 + int.from_bytes(head[:8], "little")


def _metadata(label: Label, stacks: Sequence[Stack]) -> dict[str, str]:
    return {
        "format": FORMAT,
        "checksum": _NO_CHECKSUM.decode(),
        "kind": label.kind,
        "key": label.key,
        "parent": label.parent.hex(),
        "address": label.address.hex(),
        "lo": str(label.lo),
        "tokens": label.tokens.astype("<i4", copy=False).tobytes().hex(),
        "stacks": json.dumps([[stack.dtype, stack.members] for stack in stacks]),
    }


def _field(checksum: bytes) -> bytes:
    return b'"checksum":"' + checksum + b'"'


def _checksum(length: bytes, text: bytes, data: Sequence[memoryview]) -> bytes:
    digest = xxhash.xxh3_128(length)
    for part in (text, *data):
        digest.update(part)
    return digest.hexdigest().encode()


def _parse(buffer: bytes | bytearray) -> tuple[dict[str, Any], int]:
    """The header and where the data begins."""
    start = header_bytes(bytes(buffer[:8]))
    if len(buffer) < max(start, 8):
        raise BadBlock("it is truncated")
    try:
        header = json.loads(bytes(buffer[8:start]))
    except ValueError as error:  # not JSON, or not even text
        raise BadBlock("its header cannot be read") from error
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise BadBlock("it is of another format or version")
    return header, start


def _label(header: dict[str, Any]) -> Label:
    try:
        fields: dict[str, Any] = header["__metadata__"]
        tokens = np.frombuffer(bytes.fromhex(fields["tokens"]), "<i4").astype(np.int32)
        parent, own = bytes.fromhex(fields["parent"]), bytes.fromhex(fields["address"])
        label = Label(fields["kind"], fields["key"], parent, own, int(fields["lo"]), tokens)
        complete = isinstance(fields["checksum"], str) and isinstance(fields["stacks"], str)
    except (KeyError, TypeError, ValueError) as error:
        raise BadBlock("its metadata is incomplete") from error
    if not complete or label.kind not in (COLUMNS, STATE) or address(parent, tokens) != own:
        raise BadBlock("its metadata contradicts itself")
    return label


def _stacks(header: dict[str, Any], data: memoryview) -> tuple[Stack, ...]:
    """Called once the checksum holds, so that what is wrong here was written by a defect of ours."""
    found: list[Stack] = []
    for index, (dtype, members) in enumerate(json.loads(header["__metadata__"]["stacks"])):
        tensor = header[str(index)]
        lo, hi = tensor["data_offsets"]
        array = np.require(np.frombuffer(data[lo:hi], _DTYPES[dtype][1]), requirements="A")
        array = array.reshape(tensor["shape"])
        found.append(Stack(array, dtype, tuple((layer, part) for layer, part in members)))
    return tuple(found)
