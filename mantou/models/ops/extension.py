"""The C++ extension as a module of unknown types: it may be absent where this code is only checked."""

from __future__ import annotations

import importlib
from typing import Any

kernels: Any = importlib.import_module("mantou_kernels")
"""See kernels/src/ops.h for the operations. Raises ImportError where the extension is not installed."""
