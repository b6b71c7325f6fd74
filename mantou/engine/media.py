"""Token ids under which prefix stores know a prompt that shows media. Knows digests; no media and no model.

A placeholder's own id says nothing of what it shows, so each is replaced by 31 bits of the digest, as a negative
number, which no token has. Equal prompts with equal media match, also where only what comes before a picture is equal,
and a conversation may get more pictures later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mantou.data import MediaSpan

MIN_POSITIONS = 4  # of a span: 124 bits


def stored_tokens(tokens: Sequence[int], media: Sequence[MediaSpan]) -> Sequence[int]:
    """`tokens`, or an int32 copy that names its media. Spans may reach beyond the end of `tokens`.

    Raises ValueError for a span that is too short to tell its media from others.
    """
    if not media:
        return tokens
    named = np.array(tokens, np.int32)
    for span in media:
        if span.hi - span.lo < MIN_POSITIONS:
            raise ValueError(f"media at [{span.lo}, {span.hi}) take fewer than {MIN_POSITIONS} positions")
        bits = np.frombuffer(hashlib.shake_128(span.digest.encode()).digest(4 * (span.hi - span.lo)), "<i4")
        part = named[span.lo : span.hi]
        part[:] = (bits | np.int32(-(1 << 31)))[: len(part)]
    return named.tolist()
