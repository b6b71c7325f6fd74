"""`mantou keys`: make API keys, show them, take them back. Knows the terminal; no server needs to run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="keys",
    help="Make the API keys of `mantou serve --api-key-file`, show them, take them back.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        envvar="MANTOU_API_KEY_FILE",
        help="The key file (default: keys.json in mantou's settings folder).",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(help="Whose key it is; shown in logs and by `mantou keys ls`.")]


def _path(file: Path | None) -> Path:
    from platformdirs import user_config_path

    return (file or user_config_path("mantou") / "keys.json").expanduser()


@app.command("add")
def add(
    name: Name,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it opens: generate, embed, audio, read (/stats, /metrics) or admin (everything); repeatable "
            "(default: the first three)."
        ),
    ] = None,
    requests_per_minute: Annotated[int, typer.Option(help="Most requests a minute; 0 = any.", min=0)] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(help="Most tokens a minute, prompts and answers together; 0 = any.", min=0)
    ] = 0,
    file: File = None,
) -> None:
    """Make a key and print it, this once: only its hash is kept. A running server knows it at once."""
    from mantou.api.keys import DEFAULT_SCOPES, KeyFile

    path = _path(file)
    text = KeyFile(path).add(
        name,
        scope or DEFAULT_SCOPES,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    typer.echo(text)
    typer.echo(f"Kept as a hash in {path}; start the server with --api-key-file {path}.", err=True)


@app.command("ls")
def ls(file: File = None) -> None:
    """Show the keys with their scopes and quotas; the keys themselves are not known any more."""
    from rich.console import Console
    from rich.table import Table

    from mantou.api.keys import KeyFile

    table = Table(box=None, pad_edge=False)
    for title in ("name", "scopes", "requests/min", "tokens/min", "made"):
        table.add_column(title, no_wrap=True)
    for key in KeyFile(_path(file)).read():
        quotas = [str(limit or "-") for limit in (key.requests_per_minute, key.tokens_per_minute)]
        table.add_row(key.name, ",".join(key.scopes), *quotas, key.created)
    Console().print(table)


@app.command("rm")
def rm(name: Name, file: File = None) -> None:
    """Take a key back. A running server refuses it from its next request on."""
    from mantou.api.keys import KeyFile

    KeyFile(_path(file)).remove(name)
    typer.echo(f"The key {name} is gone.")
