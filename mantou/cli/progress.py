"""Progress bars for downloads, conversions and loads. Knows no models."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from mantou.progress import ProgressBoard, Task


@contextmanager
def show_progress(board: ProgressBoard, console: Console) -> Generator[None]:
    """Draws the board's tasks while the block runs. Without a terminal each stage is one line."""
    if not console.is_terminal:
        with _lines(board, console):
            yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars: dict[int, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def changed(task: Task) -> None:
            row = task.row()
            if id(task) not in bars:
                bars[id(task)] = progress.add_task(row["repo_id"], total=None)
            progress.update(
                bars[id(task)],
                description=f"{row['stage'] or 'prepare'} {row['repo_id']}",
                total=row["total_bytes"],
                completed=row["received_bytes"],
                visible=row["state"] == "active",
            )

        stop = board.subscribe(changed)
        try:
            yield
        finally:
            stop()


@contextmanager
def _lines(board: ProgressBoard, console: Console) -> Generator[None]:
    said: set[tuple[int, str]] = set()

    def changed(task: Task) -> None:
        row = task.row()
        key = (id(task), row["stage"])
        if row["stage"] and row["state"] == "active" and key not in said:
            said.add(key)
            console.print(f"{row['stage']} {row['repo_id']} ...", markup=False)

    stop = board.subscribe(changed)
    try:
        yield
    finally:
        stop()
