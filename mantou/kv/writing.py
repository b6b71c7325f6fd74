"""The order between a primitive that writes into buffers in place and everybody else. Knows no buffers."""

from __future__ import annotations

import mlx.core as mx


class Writing:
    """What a primitive returned that writes into lent buffers, until it is launched. A graph does not know of it."""

    __slots__ = ("_result",)

    def __init__(self) -> None:
        self._result: mx.array | None = None

    def begin(self, result: mx.array) -> None:
        """`result` depends on what was written before in this forward."""
        self._result = result

    def settle(self) -> None:
        """To be called before anything else reads or writes the buffers: the device does first what it got first."""
        result, self._result = self._result, None
        if result is not None:
            mx.async_eval(result)

    def drop(self) -> None:
        self._result = None

    def arrays(self) -> tuple[mx.array, ...]:
        return () if self._result is None else (self._result,)
