"""The verb `serve`: flags to Config, port check, progress and ready card in the terminal. Knows no routes."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mantou.cli import options
from mantou.cli.card import print_card
from mantou.cli.ls import parse_size
from mantou.cli.progress import show_progress
from mantou.config import DEFAULT_SSD_BYTES, KV_SCHEMES, Config, SamplingDefaults
from mantou.data import ModelInfo, ToneCurve
from mantou.errors import ConfigError, MantouError
from mantou.progress import ProgressBoard

OnOff = Annotated[str | None, typer.Option(help="on or off")]


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens the server to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8080,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", "--decode-concurrency", help="Rows that run at once (default: from memory).", min=1
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait before new ones get 429.", min=1)
    ] = 64,
    prefill_chunk: options.PrefillChunk = 512,
    prompt_cache: Annotated[
        float, typer.Option(help="GiB of memory for prompts computed before; 0 turns it off.", min=0)
    ] = 2.0,
    ssd_cache: Annotated[
        str | None, typer.Option(help="Folder for prompts on disk, with its size if not 20GB: DIR[:SIZE].")
    ] = None,
    kv_quant: options.KvQuant = "off",
    context_length: options.ContextLength = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    cpu_activations: options.Activations = "exact",
    cache_dir: options.CacheDir = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin that may call the server from a browser; repeatable.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "--temp", help="Default temperature.", min=0, max=5)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Default top_p.", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option(help="Default top_k.", min=0)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Default cap on generated tokens.", min=1)] = None,
    thinking: OnOff = None,
    hlg_sampling: OnOff = None,
    hlg_width: Annotated[float, typer.Option(min=0, max=100, help="Tone curve: linear part, in nats.")] = 4.0,
    hlg_shoulder: Annotated[
        float, typer.Option(min=0, max=100, help="Tone curve: upper rolloff, in nats.")
    ] = 4.0,
    hlg_toe: Annotated[float, typer.Option(min=0, max=100, help="Tone curve: lower rolloff, in nats.")] = 6.0,
    hlg_pivot_offset: Annotated[
        float, typer.Option(min=0, max=100, help="Tone curve: pivot below the top, in nats.")
    ] = 6.0,
) -> None:
    """Serve a model over HTTP (OpenAI chat and completions)."""
    if kv_quant not in KV_SCHEMES:
        raise ConfigError(f"--kv-quant takes {', '.join(KV_SCHEMES)}, not {kv_quant!r}.")
    ssd_dir, ssd_bytes = ssd_folder(ssd_cache)
    curve = ToneCurve(hlg_width, hlg_shoulder, hlg_toe, hlg_pivot_offset)
    config = Config(
        model=model,
        revision=revision,
        host=host,
        port=port,
        batch=batch,
        prefill_chunk=prefill_chunk,
        max_waiting=max_waiting,
        prompt_cache_bytes=int(prompt_cache * (1 << 30)),
        ssd_cache_dir=ssd_dir,
        ssd_cache_bytes=ssd_bytes,
        kv_quant=kv_quant,
        context_length=context_length,
        dtype=dtype,
        threads=threads,
        cpu_activations=cpu_activations,
        defaults=SamplingDefaults(
            temperature,
            top_p,
            top_k,
            max_tokens,
            on_off("--thinking", thinking),
            curve if on_off("--hlg-sampling", hlg_sampling) else None,
        ),
        cache_dir=cache_dir,
        allow_origins=tuple(allow_origin or ()),
    )
    run(config)


def on_off(flag: str, value: str | None) -> bool | None:
    if value is None:
        return None
    if value not in ("on", "off"):
        raise ConfigError(f"{flag} takes on or off, not {value!r}.")
    return value == "on"


def ssd_folder(text: str | None) -> tuple[Path | None, int]:
    """`DIR` or `DIR:SIZE` -> folder and bytes."""
    if text is None:
        return None, DEFAULT_SSD_BYTES
    folder, colon, size = text.rpartition(":")
    if not colon:
        return Path(text).expanduser(), DEFAULT_SSD_BYTES
    return Path(folder).expanduser(), parse_size(size)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything slow begins. Raises ConfigError if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        advice = (
            "give --host an address of this machine"
            if unknown
            else "stop what runs there or choose another --port"
        )
        raise ConfigError(f"Cannot listen on {host}:{port} ({error.strerror}); {advice}.") from None
    listener.listen(2048)
    return listener


def run(config: Config) -> None:
    """Serves until interrupted. Raises ConfigError or the error that kept the model from loading."""
    from mantou.api.server import create_server
    from mantou.build import make_service

    console = Console(stderr=True, highlight=False)
    listener = bind(config.host, config.port)
    board = ProgressBoard()
    failures: list[MantouError] = []

    def ready(info: ModelInfo) -> None:
        print_card(console, config, info, config.port)

    def failed(error: MantouError) -> None:
        failures.append(error)
        server.should_exit = True

    service = make_service(config, board, on_ready=ready, on_failed=failed)
    server = create_server(service)
    with show_progress(board, console):
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
