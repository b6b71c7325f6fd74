"""`mantou ls`: the models on this machine. Knows the terminal; what a model is comes from the registry."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from mantou.cli.options import CacheDir
from mantou.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mantou.models.hub.registry import Entry

_UNITS = {"": 10**9, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def ls(
    query: Annotated[str | None, typer.Argument(help="Show names that contain this text only.")] = None,
    vision: Annotated[bool, typer.Option("--vision", help="Show models that take images only.")] = False,
    max_size: Annotated[str | None, typer.Option(help="Show models up to this size only, e.g. 8GB.")] = None,
    all_revisions: Annotated[
        bool,
        typer.Option(
            "--all-revisions", help="Show every revision; * marks the one that the name stands for."
        ),
    ] = False,
    cache_dir: CacheDir = None,
) -> None:
    """List the models on this machine."""
    from rich.console import Console

    from mantou.models.hub import open_registry

    limit = parse_size(max_size) if max_size is not None else None
    entries = [
        entry
        for entry in open_registry(cache_dir).entries(all_revisions=all_revisions)
        if (query is None or query.lower() in f"{entry.repo_id} {entry.source}".lower())
        and (entry.vision or not vision)
        and (limit is None or entry.size_bytes <= limit)
    ]
    if entries:
        Console().print(model_table(entries, revisions=all_revisions))
    else:
        typer.echo("No model here matches; `mantou get <org/name>` fetches one.", err=True)


def parse_size(text: str) -> int:
    """`8GB`, `500 MB` or a bare number of GB -> bytes. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B|)\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 8GB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def model_table(entries: list[Entry], *, revisions: bool = False) -> Table:
    """A row a model, with a verdict for the memory of this machine's device."""
    from rich.table import Table

    from mantou.models.device import this_device
    from mantou.models.hub.library import assess

    memory = this_device().memory_bytes
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")  # a name that is cut off cannot be copied
    for title in ("type", "parameters", "bits", "size", "context", "fits"):
        table.add_column(title, no_wrap=True)
    if revisions:
        table.add_column("revision")
    for entry in entries:
        verdict = assess(entry, memory)
        cells = [
            entry.repo_id,
            entry.model_type,
            _short(entry.param_count, ""),
            str(entry.quant_bits or "-"),
            _short(entry.size_bytes, "B"),
            str(entry.context_length or "?"),
            "yes" if verdict["fits"] else "no",
        ]
        if revisions:
            cells.append(f"{entry.revision[:12]}{' *' if entry.canonical else ''}")
        table.add_row(*cells)
    return table


def _short(number: float, unit: str) -> str:
    for prefix in ("", "K", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            return f"{number:.3g} {prefix}{unit}".strip()
        number /= 1000
    raise AssertionError("the last prefix returns")
