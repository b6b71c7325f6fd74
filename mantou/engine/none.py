"""Null objects of the axes that are no package of their own: no constraint, no adapters."""

from __future__ import annotations

from collections.abc import Sequence

from mantou.data import Request
from mantou.errors import BadRequest
from mantou.protocols import Constraint


class NoConstraints:
    def make(self, request: Request) -> Constraint | None:
        return None


class NoAdapters:
    def bind(self, rows: Sequence[tuple[str, ...]]) -> None:
        pass

    def revision(self, names: Sequence[str]) -> tuple[str, ...]:
        if names:
            raise BadRequest(
                f"No adapter is mounted, so {'+'.join(names)!r} cannot be used.", param="adapter"
            )
        return ()
