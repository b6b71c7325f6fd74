"""mantou: a local inference server on MLX with one lane for every request. `from mantou import load` is the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantou.library import Completion, Model, load

__version__ = "0.1.0"
__all__ = ["Completion", "Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import mantou` costs nothing and the server's start stays short.
    if name in ("Completion", "Model", "load"):
        from mantou import library

        return getattr(library, name)
    raise AttributeError(f"module 'mantou' has no attribute {name!r}")
