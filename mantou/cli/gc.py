"""`mantou gc`: delete what no model needs. Knows the terminal; the rules are in mantou.models.hub.collection."""

from __future__ import annotations

from typing import Annotated

import typer

from mantou.cli.options import CacheDir
from mantou.errors import MantouError


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it the list is shown only.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the list only, even with --yes.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete old revisions that hold files the current ones lack.")
    ] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Delete old revisions, unused files and conversions that died."""
    from mantou.models.hub import collection, hub_cache_dir
    from mantou.models.hub.gguf import CONVERTER_VERSION
    from mantou.models.hub.store import default_cache_dir

    planned = collection.plan(
        hub_cache_dir(), cache_dir or default_cache_dir(), converter=CONVERTER_VERSION, force=force
    )
    for warning in planned.spared:
        typer.echo(f"kept: {warning}", err=True)
    for item in planned.garbage:
        typer.echo(f"{item.size_bytes / 1e6:9.1f} MB  {item.path}  ({item.reason})")
    if not planned.garbage:
        typer.echo("Nothing to delete.")
        return
    size = f"{planned.size_bytes / 1e6:.1f} MB"
    if dry_run or not yes:
        typer.echo(f"{size} can be freed; `mantou gc --yes` deletes the above.")
        return
    try:
        collection.collect(planned)
    except OSError as error:
        raise MantouError(
            f"Cannot delete {error.filename}: {error.strerror}; the rest was left as it is."
        ) from error
    typer.echo(f"{size} freed.")
