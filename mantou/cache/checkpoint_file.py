"""The bytes of one answer in progress on disk, and its name. Knows no folder and no threads.

    one line   JSON: format, number (a count that orders files by age), checksum
    the rest   MessagePack of a GenerationCheckpoint

The checksum is XXH3-128 of the file's name, the number and the rest, so that a file under another name is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import msgspec
import xxhash

from mantou.cache.encoding import BadBlock
from mantou.data import GenerationCheckpoint

FORMAT = "mantou generation checkpoint 1"
HEAD_BYTES = 256  # the first line is shorter
OURS = re.compile(r"([0-9a-f]{64})\.[0-9a-f]{16}\.checkpoint")


@dataclass(frozen=True, slots=True)
class Head:
    number: int
    checksum: str
    size: int  # of the line


def file_name(identity: bytes, seed: int) -> str:
    """`seed` tells apart runs of equal requests that are in progress at once."""
    return f"{identity.hex()}.{seed & (1 << 64) - 1:016x}.checkpoint"


def identity_of(name: str) -> str | None:
    """The identity's digits, None for a file that is not ours."""
    match = OURS.fullmatch(name)
    return match[1] if match else None


def encode(name: str, number: int, checkpoint: GenerationCheckpoint) -> bytes:
    body = msgspec.msgpack.encode(checkpoint)
    head = {"format": FORMAT, "number": number, "checksum": _checksum(name, number, body)}
    return json.dumps(head).encode() + b"\n" + body


def read_head(start: bytes) -> Head:
    """What a file says of itself, from its first HEAD_BYTES. Raises BadBlock; the rest is not looked at."""
    line = start.partition(b"\n")[0]
    try:
        head = json.loads(line)
        known = head["format"] == FORMAT
        found = Head(int(head["number"]), str(head["checksum"]), len(line) + 1)
    except (KeyError, TypeError, ValueError) as error:
        raise BadBlock("its first line cannot be read") from error
    if not known:
        raise BadBlock("it is of another format or version")
    return found


def decode(name: str, content: bytes | bytearray) -> GenerationCheckpoint:
    """Raises BadBlock unless the file is whole and was written under this name."""
    head = read_head(bytes(content[:HEAD_BYTES]))
    body = bytes(content[head.size :])
    if _checksum(name, head.number, body) != head.checksum:
        raise BadBlock("its checksum is not that of its content")
    return msgspec.msgpack.decode(body, type=GenerationCheckpoint)


def _checksum(name: str, number: int, body: bytes) -> str:
    digest = xxhash.xxh3_128(f"{name} {number}\n".encode())
    digest.update(body)
    return digest.hexdigest()
