"""Device operations: each device's own implementation of a model's building blocks, over one seam (`DeviceOps`)."""

from __future__ import annotations

from mantou.models.ops.plain import PlainOps
from mantou.protocols import DeviceOps


def device_ops(kind: str, *, threads: int | None = None, activations: str = "exact") -> DeviceOps:
    """The operations for a device kind (cpu, metal, cuda). Raises ConfigError for an unknown `activations`.

    On a CPU these are the C++ kernels of the package mantou_kernels if they are installed, fit this MLX and pass their
    self-test; otherwise plain MLX, with the reason as a note for the ready card.
    """
    if kind == "cuda":
        from mantou.models.ops.cuda import CudaOps

        return CudaOps()
    if kind == "metal":
        from mantou.models.ops.metal import MetalOps

        return MetalOps()
    if kind != "cpu":
        return PlainOps()
    from mantou.models.ops.cpu import cpu_ops

    return cpu_ops(threads=threads, activations=activations)
