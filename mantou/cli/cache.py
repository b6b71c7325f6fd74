"""`mantou cache`: look at an SSD cache, check it, make it smaller. Knows the terminal; no model, no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mantou.cli.ls import parse_size
from mantou.errors import MantouError

app = typer.Typer(
    name="cache",
    help="Look at an SSD prompt cache, check it, make it smaller.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Directory = Annotated[Path, typer.Argument(help="The folder that `mantou serve --ssd-cache` was given.")]


@app.command("ls")
def ls(directory: Directory) -> None:
    """Show what is stored, by model, adapters and KV format, and the answers in progress."""
    from mantou.cache import checkpoints
    from mantou.cache.folder import listing

    by_key: dict[str, list[int]] = {}
    for entry in listing(directory):
        counts = by_key.setdefault(entry.label.key, [0, 0, 0])
        counts[0] += 1
        counts[1] += entry.nbytes
        counts[2] = max(counts[2], entry.label.hi)
    if not by_key:
        typer.echo("Nothing is stored.")
    else:
        _show(by_key)
    answers = checkpoints.listing(directory)
    if answers:
        nbytes = sum(size for _, size in answers)
        typer.echo(f"{len(answers)} answers in progress (generation checkpoints), {nbytes / 1e6:.1f} MB.")


def _show(by_key: dict[str, list[int]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for title in ("adapters", "KV", "files", "MB", "longest prefix"):
        table.add_column(title, no_wrap=True)
    for text, (files, nbytes, longest) in sorted(by_key.items()):
        key = json.loads(text)
        adapters = "+".join(key["adapters"]) or "-"
        table.add_row(key["model"], adapters, key["codec"], str(files), f"{nbytes / 1e6:.1f}", str(longest))
    Console().print(table)


@app.command("gc")
def gc(
    directory: Directory,
    max_size: Annotated[
        str | None,
        typer.Option(help="Also remove the prompts used longest ago until it is this small, e.g. 20GB."),
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Also remove the answers in progress (generation checkpoints).")
    ] = False,
) -> None:
    """Remove unfinished and broken files. No server may use the folder meanwhile."""
    from mantou.cache import checkpoints
    from mantou.cache.disk import Disk
    from mantou.cache.folder import Folder, listing

    before = sum(entry.nbytes for entry in listing(directory))
    folder = Folder(directory, 1 << 62 if max_size is None else parse_size(max_size), Disk())
    try:
        if folder.read_only:
            raise MantouError(f"{directory} cannot be written, so nothing was removed.")
        after = folder.nbytes
        num_removed = checkpoints.clean(directory, everything=answers)
    finally:
        folder.close()
    typer.echo(f"{max(before - after, 0) / 1e6:.1f} MB freed, {after / 1e6:.1f} MB kept.")
    if num_removed:
        typer.echo(f"{num_removed} answers in progress removed.")


@app.command("verify")
def verify(
    directory: Directory,
    fix: Annotated[bool, typer.Option("--fix", help="Remove the files that are broken.")] = False,
) -> None:
    """Read every file and compare its checksum. Exits with 1 if one is broken and stays."""
    from mantou.cache import checkpoints, folder

    entries, answers = folder.listing(directory), checkpoints.listing(directory)
    blocks = directory / folder.BLOCKS_NAME
    broken = [(blocks / entry.name, reason) for entry, reason in folder.verify(directory, entries)]
    broken += checkpoints.verify(directory)
    for path, reason in broken:
        typer.echo(f"{path.name}: {reason}", err=True)
    total = len(entries) + len(answers)
    typer.echo(f"{total - len(broken)} of {total} files are good.")
    if broken and fix:
        for path, _ in broken:
            path.unlink(missing_ok=True)
        typer.echo(f"{len(broken)} files removed.")
    elif broken:
        raise typer.Exit(1)
