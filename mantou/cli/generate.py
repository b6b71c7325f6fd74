"""The verb `generate`: one answer in the terminal, without a server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from mantou.cli import options
from mantou.cli.progress import show_progress
from mantou.progress import ProgressBoard


def generate(
    model: options.Model = options.DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask; - reads standard input.")] = "-",
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0 = greedy.", min=0, max=5)
    ] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="0 = off.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    kv_quant: options.KvQuant = "off",
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
) -> None:
    """Answer one prompt in the terminal."""
    from mantou.library import load

    text = sys.stdin.read() if prompt == "-" else prompt
    board = ProgressBoard()
    with show_progress(board, Console(stderr=True)):
        loaded = load(
            model, board=board, kv_quant=kv_quant, dtype=dtype, revision=revision, cache_dir=cache_dir
        )
    wish: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    with loaded:
        start = loaded.stream_text if raw else loaded.stream
        for event in start(text, max_tokens=max_tokens, **wish):
            sys.stdout.write(event.reasoning + event.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
