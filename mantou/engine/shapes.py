"""Buckets for rows and widths, so that a step has few shapes. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Shapes:
    """`bucketed` for devices that reuse compiled steps and graphs; exact where every padded row costs a whole row."""

    bucketed: bool

    def rows(self, count: int) -> int:
        return _power_of_two(count) if self.bucketed else count

    @property
    def span_step(self) -> int:
        """Attention over ragged rows reads a multiple of this many columns."""
        return 256 if self.bucketed else 1

    def width(self, num_tokens: int) -> int:
        return _power_of_two(num_tokens) if self.bucketed else num_tokens

    @staticmethod
    def slots(count: int) -> int:
        """Slots to allocate for `count` occupied ones: few growth copies on every device."""
        return _power_of_two(count) if count else 0
