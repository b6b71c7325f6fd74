"""Interposing OpenBLAS under plain MLX on Linux. Imports no MLX: it must run before the first `import mlx.core`."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys


def preload_openblas() -> str | None:
    """Loads OpenBLAS so that MLX's matrix products use it instead of the reference BLAS it links (about 9x in f32).

    Call it at start-up when the kernels are absent, before anything imports mlx: symbols of a library that is loaded
    first with RTLD_GLOBAL win. Returns the library's name, or None when there is nothing to do: no Linux, no OpenBLAS,
    or mlx is already loaded. Quantised products, norms and rotary embeddings gain nothing.
    """
    if not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return None
    name = ctypes.util.find_library("openblas")
    if name is None:
        return None
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return name
