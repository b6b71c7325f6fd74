"""Where models come from and which are here: sources, converted folders, registry. Knows no graphs and no mlx."""

from __future__ import annotations

from pathlib import Path

from mantou.models.hub.hugging_face import hub_cache_dir
from mantou.models.hub.registry import Entry, Registry
from mantou.models.hub.sources import obtain
from mantou.models.hub.store import default_cache_dir

__all__ = ["Entry", "Registry", "default_cache_dir", "hub_cache_dir", "obtain", "open_registry"]


def open_registry(cache_dir: Path | None = None) -> Registry:
    """The registry of this user's models; `cache_dir` holds the converted ones (None = the platform's cache)."""
    return Registry(cache_dir or default_cache_dir(), hub_cache_dir())
