"""Counter-based random numbers: a value depends on (seed, absolute position, index) alone. No state, no order."""

from __future__ import annotations

import mlx.core as mx

_MASK64 = (1 << 64) - 1
CATEGORICAL, XTC, DRAFT, ACCEPT = 0, 1, 2, 3  # independent streams of one (seed, position)


def seed_words(seed: int) -> tuple[int, int]:
    """Two uint32 key words of any integer seed, by one round of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def _mix(x: mx.array) -> mx.array:
    """A 32-bit finaliser with low bias (Ettinger's hash prospector: 16, 21f0aaad, 15, d35a2d97, 15)."""
    x = (x ^ (x >> 16)) * mx.array(0x21F0AAAD, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0xD35A2D97, mx.uint32)
    return x ^ (x >> 15)


def uniform(words: mx.array, positions: mx.array, size: int, stream: int) -> mx.array:
    """float32[B, T, size] in (0, 1). `words` uint32[B, 2] from `seed_words`, `positions` uint32[B, T]."""
    low = _mix(
        words[:, None, 0] ^ _mix(positions + mx.array(0x9E3779B9 * (stream + 1) & 0xFFFFFFFF, mx.uint32))
    )
    high = _mix(words[:, None, 1] + low)
    index = mx.arange(size, dtype=mx.uint32)
    bits = _mix(_mix(index + low[..., None]) ^ high[..., None])
    # 23 bits and half a step are exact in float32, so both ends stay open: 24 bits would round up to 1, where the
    # Gumbel noise of one token in 2**24 is infinite and wins over every logit.
    return (bits >> 9).astype(mx.float32) * 2.0**-23 + 2.0**-24


def gumbel(words: mx.array, positions: mx.array, size: int, stream: int = CATEGORICAL) -> mx.array:
    """Standard Gumbel noise float32[B, T, size]; argmax(logits + noise) is a categorical draw."""
    return -mx.log(-mx.log(uniform(words, positions, size, stream)))
