"""`mantou get`: fetch and convert a model. Knows the terminal, not where models come from."""

from __future__ import annotations

import typer

from mantou.cli.options import CacheDir, Model, Revision
from mantou.progress import ProgressBoard


def get(model: Model, revision: Revision = None, cache_dir: CacheDir = None) -> None:
    """Fetch a model and make it ready to serve."""
    from rich.console import Console

    from mantou.cli.progress import show_progress
    from mantou.models.hub import obtain

    board = ProgressBoard()
    with show_progress(board, Console(stderr=True)):
        folder = obtain(model, revision=revision, cache_dir=cache_dir, board=board, refresh=True)
    typer.echo(folder)
