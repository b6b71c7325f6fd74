"""What a loaded model says of itself and of its bounds. Knows no engine; a part of the composition root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantou.config import PAGING, Config
from mantou.data import ModelInfo
from mantou.errors import ConfigError

if TYPE_CHECKING:
    from mantou.chat.template import ChatTemplate
    from mantou.kv.budget import KVBudget
    from mantou.models.load import LoadedModel

# Chosen rows: at least this many, and on a GPU up to four times as many if the KV of so many rows fits.
MIN_ROWS = 8
_MAX_ROWS = {"cpu": 16, "metal": 32, "cuda": 64}
_TYPICAL_CONTEXT = 4096
# How families name the length of their context.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)


def describe(
    folder: Path,
    config: Config,
    loaded: LoadedModel,
    kv_scheme: str,
    device: str,
    notes: tuple[str, ...],
    template: ChatTemplate | None,
) -> ModelInfo:
    from mantou.models.runner import layout_names

    own = config_number(loaded, CONTEXT_KEYS) or _TYPICAL_CONTEXT
    if not loaded.family.ragged_offsets:
        notes = (*notes, "rows of different lengths run one after the other in this family")
    return ModelInfo(
        id=model_id(folder, config),
        model_type=loaded.family.name,
        context_length=min(own, config.context_length or own),
        vocab_size=config_number(loaded, ("vocab_size",)) or 0,
        weights_bytes=loaded.weights_bytes,
        dtype=loaded.dtype,
        device=device,
        kv_scheme=kv_scheme,
        num_layers=layout_names(loaded.shapes),
        reasoning=template is not None and template.reasoning is not None,
        notes=notes,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json, which multimodal checkpoints nest."""
    return config.get("text_config") or config.get("llm_config") or config


def config_number(loaded: LoadedModel, keys: Sequence[str]) -> int | None:
    """The first of these settings that the config.json, or the graph's own defaults, give."""
    args = getattr(loaded.module, "args", None)
    places = [text_config(loaded.config), loaded.config, vars(args) if args is not None else {}]
    found = (place.get(key) for place in places for key in keys)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def model_id(folder: Path, config: Config) -> str:
    """What clients see as the model's name: a converted model's own, the folder's for a path, else what was asked."""
    from mantou.models.hub.store import read_manifest

    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.repo_id
    return folder.name if Path(config.model).expanduser().exists() else config.model


def choose_paging(config: Config, reads_blocks: bool) -> tuple[int | None, str]:
    """Tokens of a block, or None for a buffer a row; and why. Raises ConfigError for a value that does not exist."""
    from mantou.kv.blocks import SIZES

    if config.paged_kv not in PAGING:
        raise ConfigError(f"--paged-kv takes {', '.join(PAGING)}, not {config.paged_kv!r}.")
    if config.paged_kv_block_size not in SIZES:
        sizes = ", ".join(map(str, SIZES))
        raise ConfigError(f"--paged-kv-block-size takes {sizes}, not {config.paged_kv_block_size}.")
    if config.paged_kv == "off":
        return None, "--paged-kv off"
    if config.paged_kv == "on":
        return config.paged_kv_block_size, "--paged-kv on"
    if reads_blocks and config.kv_quant == "off":
        return config.paged_kv_block_size, "auto: this device reads blocks in place"
    if reads_blocks:  # measured: docs/performance/paged-kv
        return None, "auto: quantised rows decode slower in blocks; --paged-kv on saves memory"
    return (
        None,
        "auto: attention on this device does not read blocks in place; --paged-kv on saves memory",
    )


def describe_paging(num_layers: Mapping[str, int], block: int | None, why: str) -> Mapping[str, Any]:
    """For the ready card and /stats: what is in force, and how each kind of layer keeps its rows."""
    from mantou.kv.blocks import PAGEABLE

    kept = {"window": "a ring a row", "chunked": "a ring a row", "recurrent": "a state a row"}
    ways = {
        name: "blocks" if block and name in PAGEABLE else kept.get(name, "a buffer a row")
        for name in num_layers
    }
    return {"block": block, "why": why, "layers": ways}


def default_rows(loaded: LoadedModel, token_bytes: float, kind: str, memory_bytes: int) -> int:
    """Rows whose KV at a typical context fits beside the weights in three quarters of the memory; at least 8."""
    fitting = (memory_bytes * 0.75 - loaded.weights_bytes) // max(token_bytes * _TYPICAL_CONTEXT, 1)
    return max(MIN_ROWS, min(_MAX_ROWS[kind], int(fitting)))


def limit_context(info: ModelInfo, budget: KVBudget) -> ModelInfo:
    """The context shortened to the longest row that the budget holds. Raises ConfigError if it holds none."""
    longest = budget.longest(info.context_length)
    if longest == info.context_length or budget.limit_bytes is None:
        return info
    limit = f"{budget.limit_bytes / 1e9:.3g} GB for keys and values"
    if not longest:
        smallest = budget.bytes_of([1]) / 1e9
        raise ConfigError(
            f"The budget leaves {limit}, but the shortest row of this model takes {smallest:.3g} GB; raise --kv-budget "
            "or --memory-budget."
        )
    token = budget.token_bytes / 1024
    extra = {**info.extra, "context_reason": f"the budget has {limit}, a token takes {token:.0f} KiB"}
    note = f"context {info.context_length} -> {longest} tokens: the budget has {limit}"
    return replace(info, context_length=longest, notes=(*info.notes, note), extra=extra)


def because(info: ModelInfo) -> str:
    """Why the context is shorter than the model's own, in brackets, if it is."""
    reason = info.extra.get("context_reason")
    return f" ({reason})" if reason else ""
