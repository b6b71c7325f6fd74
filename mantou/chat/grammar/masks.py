"""Masks as the Constraint seam has them: one bit a token, the lowest first. Knows no grammar."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint8]


def only(tokens: Collection[int]) -> Mask:
    """These tokens and no others; there is one at least. No longer than it must be."""
    mask = np.zeros(max(tokens) // 8 + 1, np.uint8)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return mask


def everything(num_tokens: int) -> Mask:
    return np.packbits(np.ones(num_tokens, np.uint8), bitorder="little")


def without(mask: Mask, token: int) -> Mask:
    """A copy in which the token is forbidden."""
    mask = mask.copy()
    if token // 8 < len(mask):
        mask[token // 8] &= 255 - (1 << token % 8)
    return mask
