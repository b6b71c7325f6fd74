"""Plain MLX: the oracle that every other implementation is tested against, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantou.kv.records import RecordCodec


class PlainOps:
    """Leaves the graph as it is. `notes` say why, when another implementation was meant to run."""

    name = "mlx"
    reads_blocks = False
    compiles = False
    packs: bool | None = None

    def __init__(self, *notes: str) -> None:
        self._notes = notes

    def install(self, model: Any) -> Sequence[str]:
        return self._notes

    def write_rows(
        self,
        buffer: Any,
        rows: Any,
        start: Any,
        count: Any,
        first_slot: int,
        ring: int,
        table: Any = None,
        block: int = 0,
    ) -> None:
        return None

    def read_blocks(self, q: Any, pools: Any, table: Any, block: int, span: int, **options: Any) -> None:
        return None

    def records(self, shape: Any, codec: Any) -> RecordCodec | None:
        return None

    def draw(self, logits: Any, params: Any, positions: Any, allowed: Any) -> None:
        return None
