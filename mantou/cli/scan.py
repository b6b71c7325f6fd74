"""`mantou scan`: look into every local model again. Knows the terminal only."""

from __future__ import annotations

import typer

from mantou.cli.options import CacheDir


def scan(cache_dir: CacheDir = None) -> None:
    """Build the registry of local models anew from the hub's cache and the converted folders."""
    from mantou.models.hub import open_registry

    entries = open_registry(cache_dir).rebuild()
    names = {entry.repo_id for entry in entries}
    typer.echo(f"{len(names)} models in {len(entries)} revisions.")
    for entry in entries:
        typer.echo(f"{entry.repo_id}  {entry.path}")
