"""Where models come from and which are here: sources, converted folders, registry. Knows no graphs and no mlx."""

from __future__ import annotations

from mantou.models.hub.sources import obtain

__all__ = ["obtain"]
