"""The opaque `signature` of a thinking block. Knows no other field.

A local server has nobody to protect reasoning from: the signature of a block that is shown is a digest, so that
clients which drop an unsigned block keep it; that of a block that is not shown carries the reasoning as well, so that
the next turn has it. Blocks signed by others are taken as they are.
"""

from __future__ import annotations

import base64
import hashlib

from mantou.errors import BadRequest

_SHOWN, _CARRIED = "mantou1.", "mantou1c."
_DIGEST_BYTES = 24


def sign(thinking: str, *, shown: bool) -> str:
    """The signature of a block with this reasoning."""
    data = thinking.encode()
    signed = _digest(data) if shown else _digest(data) + data
    return (_SHOWN if shown else _CARRIED) + base64.b64encode(signed).decode()


def recall(thinking: str, signature: str, where: str) -> str:
    """The reasoning of a block that comes back. Raises BadRequest if we carried it and it was damaged on its way."""
    if thinking or not signature.startswith(_CARRIED):
        return thinking
    text = _carried(signature.removeprefix(_CARRIED))
    if text is None:
        raise BadRequest(
            f"{where}.signature was changed on its way; send thinking blocks back as they came, or leave them out.",
            param=f"{where}.signature",
        )
    return text


def carried(signature: str) -> str | None:
    """The text that a signature carries; None for one that carries none, is not ours or was damaged."""
    return _carried(signature.removeprefix(_CARRIED)) if signature.startswith(_CARRIED) else None


def _carried(encoded: str) -> str | None:
    try:
        signed = base64.b64decode(encoded, validate=True)
        digest, data = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        return data.decode() if digest == _digest(data) else None
    except ValueError:  # no base64, no ASCII, no UTF-8
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
