"""The provider that never guesses."""

from __future__ import annotations

from collections.abc import Sequence

from mantou.data import Request


class NoDraft:
    wants_hidden = False

    def width(self, request: Request) -> int:
        return 0

    def propose(self, request: Request, tokens: Sequence[int], width: int) -> Sequence[int]:
        return ()

    def observe(self, request: Request, num_proposed: int, num_accepted: int) -> None:
        pass

    def release(self, request: Request) -> None:
        pass
