"""The command line: one file a verb. Bare `mantou`, or options alone, is `mantou serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mantou import __version__
from mantou.cli import bench, cache, embed, gc, generate, get, keys, ls, scan, serve
from mantou.errors import MantouError

app = typer.Typer(
    name="mantou",
    help="A local LLM inference server on MLX: one lane for every request.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
VERBS = {
    "serve": serve.serve,
    "generate": generate.generate,
    "get": get.get,
    "ls": ls.ls,
    "scan": scan.scan,
    "gc": gc.gc,
    "embed": embed.embed,
    "bench": bench.bench,
}
for name, function in VERBS.items():
    app.command(name)(function)
app.add_typer(cache.app, name="cache")
app.add_typer(keys.app, name="keys")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", "-v", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"mantou {__version__}")
        raise typer.Exit()


def _with_verb(arguments: list[str]) -> list[str]:
    """`mantou --port 9000` means `mantou serve --port 9000`; `mantou help get` means `mantou get --help`."""
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--version", "-v", "--help")):
        return ["serve", *arguments]
    return arguments


def main() -> None:
    """Runs a verb. An expected failure is one sentence on stderr and exit status 1."""
    try:
        app(_with_verb(sys.argv[1:]))
    except MantouError as error:
        typer.echo(f"mantou: {error.message}", err=True)
        sys.exit(1)
