"""Local models with a verdict for this machine, as GET /library and `mantou ls` show them. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from mantou.models.hub import catalog
from mantou.models.hub.registry import Entry

Tier = Literal["targeted", "generic"]


class Assessment(TypedDict):
    """Whether a model runs here. `max_safe_context` in tokens; None = not known from its config."""

    fits: bool
    max_safe_context: int | None
    predicted_decode_tps: float | None


class LibraryRow(TypedDict):
    """One local model. `supported` and `support_tier` are None-safe: an unknown family is not supported."""

    repo_id: str
    model_type: str
    size_bytes: int
    quant_bits: int | None
    vision: bool
    supported: bool
    support_tier: Tier | None
    serving: bool
    assessment: Assessment | None


def library(
    entries: Sequence[Entry],
    *,
    memory_bytes: int,
    tiers: Mapping[str, Tier],
    serving: Path | None = None,
    bandwidth_bytes_per_s: float | None = None,
) -> list[LibraryRow]:
    """A row a model. `tiers` says how well each model type is supported, `serving` is the folder in use.

    `memory_bytes` is that of the device that runs models; its bandwidth gives the predicted speed, if known.
    """
    return [
        LibraryRow(
            repo_id=entry.repo_id,
            model_type=entry.model_type,
            size_bytes=entry.size_bytes,
            quant_bits=entry.quant_bits,
            vision=entry.vision,
            supported=entry.model_type in tiers,
            support_tier=tiers.get(entry.model_type),
            serving=serving is not None and Path(entry.path) == serving,
            assessment=assess(entry, memory_bytes, bandwidth_bytes_per_s)
            if entry.model_type in tiers
            else None,
        )
        for entry in entries
    ]


def assess(entry: Entry, memory_bytes: int, bandwidth_bytes_per_s: float | None = None) -> Assessment:
    """What can be said from sizes alone: one row, KV in 16 bits, every weight read once a token.

    The speed is an upper bound for a dense model and None without a bandwidth: nothing is guessed.
    """
    left = catalog.usable_bytes(memory_bytes) - catalog.resident_bytes(entry.size_bytes)
    context: int | None = None
    if entry.kv_bytes_per_token and entry.context_length is not None:
        context = max(0, min(entry.context_length, left // entry.kv_bytes_per_token))
    return Assessment(
        fits=catalog.fits(entry.size_bytes, memory_bytes),
        max_safe_context=context,
        predicted_decode_tps=None
        if bandwidth_bytes_per_s is None
        else bandwidth_bytes_per_s / entry.size_bytes,
    )


def local_library(cache_dir: Path | None = None, serving: Path | None = None) -> list[LibraryRow]:
    """The models of this user on this machine's default device; families that pass the matrix are targeted."""
    from mantou.models import families
    from mantou.models.device import this_device
    from mantou.models.embedder_recipe import ENCODERS
    from mantou.models.hub import open_registry

    tiers: dict[str, Tier] = {
        name: "targeted" for name, family in families.table().items() if family.supported
    }
    tiers |= dict.fromkeys(ENCODERS, "targeted")
    entries = open_registry(cache_dir).entries()
    return library(entries, memory_bytes=this_device().memory_bytes, tiers=tiers, serving=serving)
