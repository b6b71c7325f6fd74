"""The verb `embed`: vectors of texts, or their relevance to a query, as JSON lines. Needs no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mantou.cli import options
from mantou.cli.progress import show_progress
from mantou.config import EMBEDDING_STARTER
from mantou.errors import BadRequest
from mantou.progress import ProgressBoard

if TYPE_CHECKING:
    from mantou.library import Model

_AT_ONCE = 512  # lines of standard input that are read before the first is answered


def embed(
    model: options.Model = EMBEDDING_STARTER,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", "-t", help="A text; repeatable. Without, each line of stdin."),
    ] = None,
    instruct: Annotated[
        str | None, typer.Option(help="The task in words, for models that were trained on instructions.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="One of the checkpoint's own prompts.")] = None,
    query: Annotated[
        str | None, typer.Option(help="Print each text's relevance to this query instead of its vector.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep the first so many numbers, at unit length.", min=1)
    ] = None,
    truncate: Annotated[bool, typer.Option(help="Cut texts that are too long.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON array of all vectors or scores instead of a line each.")
    ] = False,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
) -> None:
    """Print the vectors of texts as JSON lines."""
    from mantou.library import load

    texts = _numbered(text or (line.rstrip("\r\n") for line in sys.stdin))
    board = ProgressBoard()
    with show_progress(board, Console(stderr=True)):
        loaded = load(
            model,
            board=board,
            dtype=dtype,
            threads=threads,
            revision=revision,
            cache_dir=cache_dir,
            embeds=True,
        )
    everything: list[object] = []
    with loaded:
        while chunk := list(islice(texts, _AT_ONCE)):
            if query is None:
                vectors = loaded.embed(
                    chunk,
                    dimensions=dimensions,
                    instruction=instruct,
                    prompt_name=prompt_name,
                    truncate=truncate,
                )
                found: Sequence[object] = vectors.tolist()
            else:
                found = _scores(loaded, query, chunk, truncate)
            if as_json:
                everything += found
            else:
                sys.stdout.writelines(f"{json.dumps(one)}\n" for one in found)
                sys.stdout.flush()
    if as_json:
        sys.stdout.write(f"{json.dumps(everything)}\n")


def _scores(model: Model, query: str, texts: Sequence[str], truncate: bool) -> Sequence[float]:
    return model.score([(query, text) for text in texts], truncate=truncate)


def _numbered(texts: Iterable[str]) -> Iterator[str]:
    """The texts, none of them empty, so that line n of the output is line n of the input."""
    for number, text in enumerate(texts, 1):
        if not text:
            raise BadRequest(f"Text {number} is empty; remove the line, or put something there.")
        yield text
