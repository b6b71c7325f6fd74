"""Device operations: each device's own implementation of a model's building blocks, over one seam (`DeviceOps`)."""

from __future__ import annotations

from mantou.models.ops.plain import PlainOps
from mantou.protocols import DeviceOps


def device_ops(kind: str, *, threads: int | None = None, activations: str = "exact") -> DeviceOps:
    """The operations for a device kind (cpu, metal, cuda)."""
    return PlainOps()
