"""GGUF files turned into MLX model folders. Knows no network and no cache: one file in, one folder out."""

from __future__ import annotations

from mantou.models.hub.gguf.conversion import CONVERTER_VERSION, convert, measure

__all__ = ["CONVERTER_VERSION", "convert", "measure"]
