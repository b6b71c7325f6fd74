"""A short table of strong chat models by size, and which of them fits a machine. Knows no network."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

_USABLE_SHARE = 0.7  # the rest is the system's: macOS lets a GPU use 65 to 75 % of unified memory
_WORKING_BYTES = 500_000_000  # activations, compiled graphs and the process itself
_CONTEXT_SHARE = 0.1  # room for some thousand tokens of KV beside the weights


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model worth naming. `size_bytes` is the size of its weights on disk, rounded."""

    repo_id: str
    model_type: str
    size_bytes: int
    note: str


# Weakest first; instruct models in 4 bits from the mlx-community organisation, all of them text-only or usable so.
CATALOG = (
    CatalogEntry("mlx-community/Qwen3-0.6B-4bit", "qwen3", 340_000_000, "smallest that holds a conversation"),
    CatalogEntry("mlx-community/Qwen3-1.7B-4bit", "qwen3", 970_000_000, "quick on any laptop"),
    CatalogEntry("mlx-community/SmolLM3-3B-4bit", "smollm3", 1_740_000_000, "open data, long context"),
    CatalogEntry("mlx-community/Qwen3-4B-Instruct-2507-4bit", "qwen3", 2_270_000_000, "strong for its size"),
    CatalogEntry("mlx-community/Qwen3-8B-4bit", "qwen3", 4_620_000_000, "good all-round, can reason"),
    CatalogEntry("mlx-community/Qwen3-14B-4bit", "qwen3", 8_320_000_000, "better knowledge, slower"),
    CatalogEntry(
        "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit",
        "qwen3_moe",
        17_200_000_000,
        "3B active: strong and quick",
    ),
    CatalogEntry(
        "mlx-community/Llama-3.3-70B-Instruct-4bit", "llama", 39_700_000_000, "dense, broad knowledge"
    ),
    CatalogEntry(
        "mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit",
        "qwen3_moe",
        132_000_000_000,
        "for the largest machines",
    ),
)


def usable_bytes(memory_bytes: int) -> int:
    """What a server may take of a machine's (or a GPU's) memory."""
    return int(memory_bytes * _USABLE_SHARE)


def resident_bytes(weights_bytes: int) -> int:
    """What a server with these weights needs before the first token of context."""
    return weights_bytes + _WORKING_BYTES


def fits(weights_bytes: int, memory_bytes: int) -> bool:
    """Whether a model runs with room for a normal conversation."""
    return resident_bytes(weights_bytes) + int(weights_bytes * _CONTEXT_SHARE) <= usable_bytes(memory_bytes)


def strongest_fit(memory_bytes: int, supported: Container[str] | None = None) -> CatalogEntry | None:
    """The strongest model of the table for this memory; `supported` limits the model types. None if none fits."""
    fitting = [
        entry
        for entry in CATALOG
        if fits(entry.size_bytes, memory_bytes) and (supported is None or entry.model_type in supported)
    ]
    return fitting[-1] if fitting else None
