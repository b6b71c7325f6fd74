"""A short table of strong chat models by size, and which of them fits a machine. Knows no network."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

_USABLE_SHARE = 0.7  # the rest is the system's: macOS lets a GPU use 65 to 75 % of unified memory
_WORKING_BYTES = 500_000_000  # activations, compiled graphs and the process itself
_CONTEXT_SHARE = 0.1  # room for some thousand tokens of KV beside the weights


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model worth naming. `size_bytes` is the size of its weights, `active_bytes` what one token reads; rounded."""

    repo_id: str
    model_type: str
    size_bytes: int
    active_bytes: int
    note: str


def _dense(name: str, model_type: str, size_gb: float, note: str) -> CatalogEntry:
    return _sparse(name, model_type, size_gb, size_gb, note)


def _sparse(name: str, model_type: str, size_gb: float, active_gb: float, note: str) -> CatalogEntry:
    return CatalogEntry(f"mlx-community/{name}", model_type, int(size_gb * 1e9), int(active_gb * 1e9), note)


# Weakest first: instruct models in 4 bits. What counts is the order, so sizes may be off by a few per cent.
CATALOG = (
    _dense("Qwen3-0.6B-4bit", "qwen3", 0.34, "smallest that holds a conversation"),
    _dense("Qwen3-1.7B-4bit", "qwen3", 0.97, "quick on any laptop"),
    _dense("SmolLM3-3B-4bit", "smollm3", 1.74, "open data, long context"),
    _dense("Qwen3-4B-Instruct-2507-4bit", "qwen3", 2.27, "strong for its size"),
    _dense("Qwen3-8B-4bit", "qwen3", 4.62, "good all-round, can reason"),
    _dense("Qwen3-14B-4bit", "qwen3", 8.32, "more knowledge, slower"),
    _sparse(
        "Qwen3-30B-A3B-Instruct-2507-4bit", "qwen3_moe", 17.2, 1.9, "strong, and quick: reads 3B a token"
    ),
    _dense("Llama-3.3-70B-Instruct-4bit", "llama", 39.7, "broad knowledge, slow"),
    _sparse("Qwen3-235B-A22B-Instruct-2507-4bit", "qwen3_moe", 132.0, 12.4, "for the largest machines"),
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


def strongest_fit(
    memory_bytes: int, supported: Container[str] | None = None, *, max_active_bytes: int | None = None
) -> CatalogEntry | None:
    """The strongest model of the table for this memory; None if none fits.

    `supported` limits the model types. `max_active_bytes` limits what a token may read: where memory is slow (a
    CPU), a large dense model fits and is still no advice.
    """
    fitting = [
        entry
        for entry in CATALOG
        if fits(entry.size_bytes, memory_bytes)
        and (supported is None or entry.model_type in supported)
        and (max_active_bytes is None or entry.active_bytes <= max_active_bytes)
    ]
    return fitting[-1] if fitting else None
