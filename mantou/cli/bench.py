"""`mantou bench`: how fast the engine is in this process, without HTTP. Knows no server and no other engine."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mantou.cli import options
from mantou.cli.progress import show_progress
from mantou.config import Config
from mantou.data import ModelInfo, Request, Sampling, TokenEvent
from mantou.errors import ConfigError, MantouError
from mantou.progress import ProgressBoard

if TYPE_CHECKING:
    from mantou.chat.tokenizer import Tokenizer
    from mantou.engine.engine import Engine

# Openings that a model goes on from for long, short enough that decoding is what takes the time.
OPENINGS = (
    "Once upon a time there was a fox who",
    "The old sailor opened his diary and wrote:",
    "Bread is made from grain in many steps. First",
    "Every morning the gardener walks through the city and",
    "The history of the village begins when",
    "Rain forms high above the ground, where",
    "The long walk through the mountains started",
    "In the first room of the house there is",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One load. tok_s = generated tokens / wall clock; for a prompt alone, prompt tokens / wall clock."""

    clients: int
    prompt_tokens: int
    tokens: int
    wall_s: float
    tok_s: float


class Tally:
    """A mailbox that keeps only what a measurement needs: the last event of every request."""

    def __init__(self) -> None:
        self._left = 0
        self._last: list[TokenEvent] = []
        self._done = threading.Event()

    def expect(self, num_requests: int) -> None:
        self._left, self._last = num_requests, []
        self._done.clear()

    def put(self, events: Sequence[TokenEvent]) -> None:
        ended = [event for event in events if event.finish is not None]
        self._last += ended
        self._left -= len(ended)
        if self._left == 0:
            self._done.set()

    def wait(self) -> list[TokenEvent]:
        """The last events of all expected requests. Raises MantouError if one failed."""
        self._done.wait()
        for event in self._last:
            if event.error is not None:
                raise MantouError(event.error)
        return self._last


class Bench:
    """An engine, and loads to put on it."""

    def __init__(self, engine: Engine, tally: Tally, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tally = tally
        self._tokenizer = tokenizer
        self._serial = itertools.count(1)

    def openings(self, clients: int, max_tokens: int, *, seeded: bool = False) -> Run:
        """`clients` completions at once, each with a prompt of some ten tokens."""
        return self._run([self._opening(max_tokens, seeded=seeded) for _ in range(clients)])

    def prompt(self, num_tokens: int) -> Run:
        """One prompt of `num_tokens` tokens, and one token after it."""
        ids = itertools.chain.from_iterable(self._encode(text) for text in itertools.cycle(OPENINGS))
        number = next(self._serial)
        run = self._run([Request(str(number), tuple(itertools.islice(ids, num_tokens)), Sampling(), 1)])
        return Run(run.clients, run.prompt_tokens, run.tokens, run.wall_s, run.prompt_tokens / run.wall_s)

    def _opening(self, max_tokens: int, *, seeded: bool) -> Request:
        number = next(self._serial)
        prompt = self._encode(f"{number}. {OPENINGS[number % len(OPENINGS)]}")
        sampling = Sampling(temperature=0.8, seed=number) if seeded else Sampling()
        return Request(str(number), prompt, sampling, max_tokens, self._tokenizer.eos)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def _run(self, requests: Sequence[Request]) -> Run:
        self._tally.expect(len(requests))
        before = time.perf_counter()
        for request in requests:
            self._engine.submit(request)
        ended = self._tally.wait()
        wall_s = time.perf_counter() - before
        usages = [event.usage for event in ended if event.usage is not None]
        tokens = sum(usage.completion_tokens for usage in usages)
        prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        return Run(len(requests), prompt_tokens, tokens, wall_s, tokens / wall_s)


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    clients: Annotated[
        str, typer.Option(help="Numbers of requests at once, separated by commas.")
    ] = "1,4,8,16",
    max_tokens: Annotated[int, typer.Option(help="Tokens that each request generates at most.", min=1)] = 64,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of the prompt that is timed; 0 = none.", min=0)
    ] = 512,
    seeded: Annotated[
        bool, typer.Option(help="Sample with a seed on every request instead of greedily.")
    ] = False,
    batch: Annotated[
        int | None, typer.Option(help="Rows of the batch (default: chosen from memory).", min=1)
    ] = None,
    kv_quant: options.KvQuant = "off",
    prefill_chunk: options.PrefillChunk = 512,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    cpu_activations: options.Activations = "exact",
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the engine in this process, without HTTP."""
    counts = _counts(clients)
    config = Config(
        model=model,
        revision=revision,
        batch=batch,
        prefill_chunk=prefill_chunk,
        kv_quant=kv_quant,
        dtype=dtype,
        threads=threads,
        cpu_activations=cpu_activations,
        cache_dir=cache_dir,
    )
    loads = [("prompt", prompt_tokens)] if prompt_tokens else []
    loads += [("clients", count) for count in counts]
    info, runs = _measure(config, loads, max_tokens, seeded=seeded)
    if as_json:
        typer.echo(
            json.dumps({"model": info.id, "device": info.device, "runs": [asdict(run) for run in runs]})
        )
    else:
        _show(info, loads, runs)


def _counts(clients: str) -> list[int]:
    try:
        counts = [int(part) for part in clients.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--clients takes whole numbers separated by commas, such as 1,8, not {clients!r}.")
    return counts


def _measure(
    config: Config, loads: Sequence[tuple[str, int]], max_tokens: int, *, seeded: bool
) -> tuple[ModelInfo, list[Run]]:
    from mantou import build
    from mantou.engine.engine import Engine

    board, tally = ProgressBoard(), Tally()
    settled: queue.SimpleQueue[ModelInfo | MantouError] = queue.SimpleQueue()
    with show_progress(board, Console(stderr=True)):
        assembly = build.assemble(build.obtain_folder(config, board), config)
        engine = build.make_engine(assembly, tally, board, on_ready=settled.put, on_failed=settled.put)
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"{config.model} is an embedding model; bench measures models that generate text."
            )
        engine.start()
        info = settled.get()
    if isinstance(info, MantouError):
        raise info
    try:
        measured = Bench(engine, tally, assembly.tokenizer)
        measured.openings(2, 4)  # what is built at first use stays out of the figures
        runs = [
            measured.prompt(size) if kind == "prompt" else measured.openings(size, max_tokens, seeded=seeded)
            for kind, size in loads
        ]
    finally:
        engine.close()
    return info, runs


def _show(info: ModelInfo, loads: Sequence[tuple[str, int]], runs: Sequence[Run]) -> None:
    table = Table(
        "load", "tok/s", "tokens", "seconds", title=f"{info.id} on {info.device}, KV {info.kv_scheme}"
    )
    for (kind, size), run in zip(loads, runs, strict=True):
        name = f"prompt of {size} tokens" if kind == "prompt" else f"{size} at once"
        tokens = run.prompt_tokens if kind == "prompt" else run.tokens
        table.add_row(name, f"{run.tok_s:.1f}", str(tokens), f"{run.wall_s:.2f}")
    Console().print(table)
