"""Metal: plain MLX, but attention over packed keys and values in place. Written against the emulation of the kernels;
never run on Apple hardware so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mantou.kv.plan import LayerCodec
from mantou.kv.records import RecordCodec
from mantou.kv.shapes import LayerShape
from mantou.models.ops.in_place import InPlace
from mantou.models.ops.plain import PlainOps
from mantou.models.ops.records import metal_kernels


class MetalOps(PlainOps):
    name = "metal"

    def __init__(self) -> None:
        super().__init__()
        self._attention = InPlace(metal_kernels)

    def install(self, model: Any) -> Sequence[str]:
        return self._attention.install()

    def records(self, shape: LayerShape, codec: LayerCodec) -> RecordCodec | None:
        return self._attention.records(shape, codec)
