"""Interposing OpenBLAS under plain MLX on Linux. Imports no MLX: it must run before the first `import mlx.core`."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

_in_force: list[str] = []  # of this process: the library that was loaded first


def in_force() -> str | None:
    """The OpenBLAS that MLX's float products use in this process, or None."""
    return _in_force[0] if _in_force else None


def kernels_expected(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the CPU kernels are asked for and installed for this MLX, as far as files tell: nothing is imported."""
    if environ.get("MANTOU_CPU_KERNELS", "1") == "0":
        return False
    spec = importlib.util.find_spec("mantou_kernels")
    if spec is None or spec.origin is None:
        return False
    built_for = Path(spec.origin).with_name("_built_for.py")
    try:
        return runpy.run_path(str(built_for)).get("MLX") == importlib.metadata.version("mlx")
    except (OSError, importlib.metadata.PackageNotFoundError):
        return False


def preload_openblas(environ: Mapping[str, str] = os.environ) -> str | None:
    """Loads OpenBLAS so that MLX's matrix products use it instead of the reference BLAS it links (about 9x in f32).

    Call it at start-up, before anything imports mlx: symbols of a library that is loaded first with RTLD_GLOBAL win.
    Returns the library's name, or None when there is nothing to do: no Linux, no OpenBLAS, kernels that need none, mlx
    already loaded, or MANTOU_OPENBLAS=0. Quantised products, norms and rotary embeddings gain nothing. Its sums depend
    on the shape of a product, so that the last digits of a row may change with its neighbours in the batch.
    """
    if _in_force:
        return _in_force[0]
    if not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return None
    if environ.get("MANTOU_OPENBLAS", "1") == "0" or kernels_expected(environ):
        return None
    name = ctypes.util.find_library("openblas")
    if name is None:
        return None
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    _in_force.append(name)
    return name
