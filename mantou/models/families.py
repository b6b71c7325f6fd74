"""Which model families mantou serves, and how their rows may be batched. Generated facts; knows no graph.

`families.json` beside this file is written by the per-family test (tests/compose), never by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mantou.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What the per-family matrix found.

    ragged_offsets: rows of different lengths may share a forward (the graph takes `cache.offset` as an array).
    ragged_widths: rows of one forward may hold different numbers of tokens (right padding does not leak).
    Where one of them is false, unlike rows run one after the other in the same step.
    """

    name: str
    supported: bool
    layouts: tuple[str, ...] = ()  # full, window, recurrent
    ragged_offsets: bool = True
    ragged_widths: bool = True
    mask_axes: int = 4  # axes of an attention mask with one plane a row
    reason: str = ""  # why not, where something is not supported


@cache
def table() -> dict[str, Family]:
    rows = json.loads(resources.files("mantou.models").joinpath("families.json").read_text("utf-8"))
    return {
        name: Family(
            name=name,
            supported=row["supported"],
            layouts=tuple(row.get("layouts", ())),
            ragged_offsets=row.get("ragged_offsets", True),
            ragged_widths=row.get("ragged_widths", True),
            mask_axes=row.get("mask_axes", 4),
            reason=row.get("reason", ""),
        )
        for name, row in rows.items()
    }


def refusal(family: str, reason: str) -> str:
    supported = ", ".join(sorted(name for name, row in table().items() if row.supported))
    return f"Models of type {family!r} are not supported: {reason}. Supported types: {supported}."


def check(family: str) -> Family:
    """The family's row. Raises ModelError with the reason and the list of supported families."""
    row = table().get(family)
    if row is None:
        raise ModelError(refusal(family, "no such family is known"))
    if not row.supported:
        raise ModelError(refusal(family, row.reason))
    return row
