"""The verb `serve`: flags to Config, port check, progress and ready card in the terminal. Knows no routes."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mantou.cli import options
from mantou.cli.card import print_card
from mantou.cli.ls import parse_size
from mantou.cli.progress import show_progress
from mantou.config import (
    DEFAULT_SSD_BYTES,
    KV_SCHEMES,
    LOG_FORMATS,
    LOG_LEVELS,
    Config,
    SamplingDefaults,
)
from mantou.data import ModelInfo, ToneCurve
from mantou.errors import ConfigError, MantouError
from mantou.progress import ProgressBoard

_SWITCH_INTERVAL_S = 0.0005
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
    generation_checkpoint: Annotated[
        int,
        typer.Option(
            help="Save running answers to --ssd-cache every N tokens, so that a repeated request goes on; 0 = never.",
            min=0,
        ),
    ] = 0,
    kv_quant: options.KvQuant = "off",
    kv_quant_start: options.KvQuantStart = 0,
    kv_group_size: options.KvGroupSize = 64,
    paged_kv: options.PagedKv = "auto",
    paged_kv_block_size: options.PagedKvBlockSize = 64,
    kv_budget: Annotated[
        str | None,
        typer.Option(help="Memory for the rows' keys and values together, like 4GB; rows beyond it wait."),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Memory for weights, keys and values and one prompt chunk, like 12GB.")
    ] = None,
    context_length: options.ContextLength = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    cpu_activations: options.Activations = "exact",
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="A small model with the same vocabulary, or a head for this model, that guesses ahead."
        ),
    ] = None,
    draft_kind: Annotated[
        str | None,
        typer.Option(
            help="Who guesses tokens ahead: ngram (copies of earlier text), model or a kind of head (eagle, mtp; "
            "default: as the weights of --draft-model say), off, or several as ngram,model."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens guessed at once (default: 10 by ngram, 4 by a model).", min=1, max=64),
    ] = None,
    draft_verify: Annotated[
        str,
        typer.Option(
            help="agree: answers do not depend on drafts. rejection: only their distribution does not."
        ),
    ] = "agree",
    mtp: Annotated[
        str | None,
        typer.Option(
            help="on or off: guess with the model's own multi-token-prediction layer (default: if it has one)."
        ),
    ] = None,
    ngram_min: Annotated[int, typer.Option(help="Equal tokens before a copy is guessed.", min=1, max=32)] = 2,
    ngram_max: Annotated[
        int, typer.Option(help="Equal tokens from which on a longer match is not looked for.", min=1, max=32)
    ] = 8,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls, such as hermes or qwen3_coder; off = they stay text (default: as "
            "its template shows)."
        ),
    ] = None,
    response_store: Annotated[
        str,
        typer.Option(
            help="Where /v1/responses keeps conversations: memory, off, or a folder, where they survive a restart."
        ),
    ] = "memory",
    response_ttl: Annotated[
        float, typer.Option(help="Seconds after which a stored response is forgotten; 0 = never.", min=0)
    ] = 3600.0,
    response_bytes: Annotated[
        str,
        typer.Option(help="Size of all stored responses together, like 32MB; the longest unused go first."),
    ] = "32MB",
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="A second model, for /v1/embeddings, /v1/rerank and /v1/score; an embedding model may also be MODEL."
        ),
    ] = None,
    embedding_batch_tokens: Annotated[
        int | None,
        typer.Option(help="Most padded tokens of one embedding batch (default: by device).", min=1),
    ] = None,
    cache_dir: options.CacheDir = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin that may call the server from a browser; repeatable.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MANTOU_API_KEY",
            help="A key that opens everything; the environment hides it from `ps`.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar="MANTOU_API_KEY_FILE", help="The keys of `mantou keys`, with scopes and quotas."),
    ] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Serve other machines without asking for a key.")
    ] = False,
    max_body: Annotated[int, typer.Option(help="Largest request body, in MiB.", min=1)] = 64,
    drain_timeout: Annotated[
        int,
        typer.Option(help="Seconds that running requests may go on once the server is told to stop.", min=0),
    ] = 20,
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each request), warning or error.")
    ] = "warning",
    log_format: Annotated[str, typer.Option(help="text or json (one object a line).")] = "text",
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
    """Serve a model over HTTP (OpenAI chat and completions, Anthropic messages)."""
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
        generation_checkpoint=generation_checkpoint,
        kv_quant=kv_quant,
        kv_quant_start=kv_quant_start,
        kv_group_size=kv_group_size,
        paged_kv=paged_kv,
        paged_kv_block_size=paged_kv_block_size,
        kv_budget_bytes=None if kv_budget is None else parse_size(kv_budget),
        memory_budget_bytes=None if memory_budget is None else parse_size(memory_budget),
        context_length=context_length,
        dtype=dtype,
        threads=threads,
        cpu_activations=cpu_activations,
        draft_model=draft_model,
        draft_kind=draft_kind,
        num_draft_tokens=num_draft_tokens,
        draft_verify=draft_verify,
        mtp=None if mtp == "auto" else on_off("--mtp", mtp),
        ngram_min=ngram_min,
        ngram_max=ngram_max,
        fill=os.environ.get("MANTOU_FILL") or None,
        tool_parser=tool_parser,
        response_store=response_store,
        response_ttl_s=response_ttl,
        response_bytes=parse_size(response_bytes),
        defaults=SamplingDefaults(
            temperature,
            top_p,
            top_k,
            max_tokens,
            on_off("--thinking", thinking),
            curve if on_off("--hlg-sampling", hlg_sampling) else None,
        ),
        embedding_model=embedding_model,
        embedding_batch_tokens=embedding_batch_tokens,
        cache_dir=cache_dir,
        allow_origins=tuple(allow_origin or ()),
        api_key=api_key or None,
        api_key_file=None if api_key_file is None else api_key_file.expanduser(),
        insecure_no_auth=insecure_no_auth,
        max_body_bytes=max_body << 20,
        drain_timeout_s=drain_timeout,
        log_level=one_of("--log-level", log_level, LOG_LEVELS),
        log_format=one_of("--log-format", log_format, LOG_FORMATS),
    )
    run(config)


def one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{flag} takes {', '.join(known)}, not {value!r}.")
    return value


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
    from mantou.api.logs import configure
    from mantou.api.server import create_server
    from mantou.build import check, make_service

    check(config)
    # Whoever writes the cache to the disk may hold the interpreter so long; a decode step takes a few milliseconds.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    configure(config.log_format, config.log_level)
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
