"""The provider that never guesses."""

from __future__ import annotations

from collections.abc import Sequence

from mantou.data import Draft, DraftAsk, Request
from mantou.protocols import Forwarded


class NoDraft:
    wants_hidden = False

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return 0

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return [Draft()] * len(asks)

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        return 0.0

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        pass

    def absorb(self, forwarded: Forwarded) -> None:
        pass

    def timed(self, num_tokens: Sequence[int], num_held: int, seconds: float) -> None:
        pass

    def release(self, request: Request) -> None:
        pass
