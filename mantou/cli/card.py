"""The ready card: what runs, how, and the line to try it with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from mantou.config import Config
from mantou.data import ModelInfo

_GIB = 1 << 30
# A CPU reads 10 to 50 GB/s: more weights a token than this and an answer takes minutes.
_CPU_ACTIVE_BYTES = 3_000_000_000


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / (1 << 20):.0f} MiB"


def _memory(config: Config, info: ModelInfo) -> str:
    """What the rows and the prompt cache may take of the device's memory."""
    rows, token = int(info.extra.get("rows", 0)), float(info.extra.get("kv_bytes_per_token", 0))
    parts = [
        f"{_size(int(info.extra.get('memory_bytes', 0)))} in all",
        f"{rows} rows at {token / 1024:.0f} KiB a token",
    ]
    if config.prompt_cache_bytes:
        parts.append(f"prompt cache {_size(config.prompt_cache_bytes)}")
    if config.ssd_cache_dir is not None:
        parts.append(f"on disk {_size(config.ssd_cache_bytes)}")
    if config.generation_checkpoint:
        parts.append(f"answers saved every {config.generation_checkpoint} tokens")
    return ", ".join(parts)


def _codecs(info: ModelInfo) -> str:
    """The scheme, and where it is not the same for all layers, how many have which codec."""
    counts: dict[str, int] = info.extra.get("kv_codecs", {})
    if set(counts) <= {info.kv_scheme}:
        return info.kv_scheme
    return info.kv_scheme + ": " + ", ".join(f"{count} {name}" for name, count in counts.items())


def _paging(info: ModelInfo) -> str:
    """Whether rows share pools of blocks, and why."""
    found: Mapping[str, Any] = info.extra.get("kv_paging", {})
    block, why = found.get("block"), found.get("why", "this model keeps no keys and values")
    if not block:
        return f"off ({why})"
    apart = sorted(name for name, way in found["layers"].items() if way != "blocks")
    rest = f"; {', '.join(apart)} layers keep their rows apart" if apart else ""
    return f"blocks of {block} tokens ({why}){rest}"


def card_lines(config: Config, info: ModelInfo, port: int) -> list[str]:
    """The card as plain lines."""
    url = f"http://{'127.0.0.1' if config.host in ('0.0.0.0', '::') else config.host}:{port}"
    layers = ", ".join(f"{count} {name}" for name, count in info.num_layers.items())
    embeddings = info.extra.get("embeddings")
    if info.extra.get("embeds_only"):
        return [
            f"mantou is ready on {url}",
            f"  embeds   {embeddings}, {_size(info.weights_bytes)} as {info.dtype}",
            f"  device   {info.device}",
            *(f"  note     {note}" for note in info.notes),
            f"  try      curl {url}/v1/embeddings -H 'content-type: application/json' -d '{{\"input\": \"Hello\"}}'",
        ]
    lines = [
        f"mantou is ready on {url}",
        f"  model    {info.id} ({info.model_type}, {_size(info.weights_bytes)} as {info.dtype})",
        f"  device   {info.device}",
        f"  KV       {_codecs(info)} ({layers} layers), context {info.context_length} tokens",
    ]
    lines.append(f"  paging   {_paging(info)}")
    lines.append(f"  memory   {_memory(config, info)}")
    if embeddings:
        lines.append(f"  embeds   {embeddings}")
    if drafts := info.extra.get("drafts"):
        lines.append(f"  drafts   {drafts}")
    lines += [f"  note     {note}" for note in info.notes]
    if stronger := _stronger(info):
        lines.append(f"  stronger {stronger}")
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    lines += [
        "  try      " + f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    ]
    return lines


def _stronger(info: ModelInfo) -> str | None:
    """The strongest curated model that fits this machine, if it is not the one that runs."""
    from mantou.models import families
    from mantou.models.device import this_device
    from mantou.models.hub.catalog import strongest_fit

    device = this_device()
    supported = {name for name, family in families.table().items() if family.supported}
    active = _CPU_ACTIVE_BYTES if device.on_cpu else None
    entry = strongest_fit(device.memory_bytes, supported, max_active_bytes=active)
    if entry is None or entry.repo_id == info.id:
        return None
    return f"{entry.repo_id} fits this machine: mantou get {entry.repo_id}"


def print_card(console: Console, config: Config, info: ModelInfo, port: int) -> None:
    console.print("\n".join(card_lines(config, info, port)), markup=False, soft_wrap=True)
