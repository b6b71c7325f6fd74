"""`make bench`: runs mantou and mlx_lm.server side by side on one model and writes docs/performance/DATE.json.

The rounds are interleaved (A B, B A, ...) and every round starts fresh processes, so that a machine that slows down
slows both. Only one server runs at a time. Knows the order of things; what is measured is in load.py.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mantou.config import STARTER
from tests.bench import cache, load, report
from tests.bench.process import Server, System, running, systems

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "performance"
ENGINE_CLIENTS = 8


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--model", default=STARTER, help="MLX model folder, or what `mantou serve` takes")
    parser.add_argument("--systems", default="mantou,mlx_lm.server", help="which to run")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another server to compare with, e.g. 'llama.cpp=llama-server -m FILE.gguf --port {port}'; repeatable",
    )
    parser.add_argument("--mantou-args", default="--batch 16", help="more flags for `mantou serve`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,4,8,16", help="numbers of clients")
    parser.add_argument("--tokens", type=int, default=48, help="tokens a request generates at most")
    parser.add_argument(
        "--long-words", type=int, default=465, help="words of the long prompt (about 512 tokens)"
    )
    parser.add_argument(
        "--no-seed", action="store_true", help="leave out the runs with a seed on every request"
    )
    parser.add_argument("--no-engine", action="store_true", help="leave out the bare engine")
    parser.add_argument("--no-cache", action="store_true", help="leave out the prompt cache (cache.py)")
    parser.add_argument(
        "--soak", type=int, default=1000, help="requests of the memory test, 0 = leave it out"
    )
    parser.add_argument("--soak-all", action="store_true", help="memory test of mlx_lm.server too (slow)")
    parser.add_argument(
        "--quick", action="store_true", help="one small round: shows that it works, measures little"
    )
    parser.add_argument(
        "--output", type=Path, help="the JSON file; default docs/performance/DATE.json, none if --quick"
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.clients, args.tokens, args.soak, args.long_words = 1, "1,8", 12, 0, 100
    args.clients = [int(part) for part in args.clients.split(",")]
    args.systems = args.systems.split(",")
    return args


def model_folder(model: str) -> Path:
    """The folder of an MLX model: `mantou get` obtains and converts what is not there yet."""
    if Path(model).is_dir():
        return Path(model).resolve()
    command = [sys.executable, "-m", "mantou", "get", model]
    got = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(got.stdout.strip().splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names this machine or its user."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "mantou": version("mantou"),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def other(peer: str) -> System:
    """A server that the caller brings: it needs /health and OpenAI's completions routes."""
    name, _, command = peer.partition("=")
    return System(name, shlex.split(command))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def one_round(system: System, model: Path, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Everything but the soak, on one fresh process."""
    found: dict[str, Any] = {"system": system.name, "round": number}
    async with running(system, model) as server:
        found |= await load.start(server)
        say(
            f"  {system.name}: ready {found['ready_s']:.2f} s, first token {found['cold_first_token_s']:.2f} s"
        )
        found["rss_ready_bytes"] = server.rss_bytes()
        await load.throughput(
            server, 2, 4, seeded=False
        )  # shapes of a batch are compiled here, not in a figure
        found |= await load.first_tokens(server, 1 if args.quick else 5, 1, args.long_words)
        found["throughput"] = await sweep(server, args, seeded=False)
        if not args.no_seed:
            found["throughput_seeded"] = await sweep(server, args, seeded=True)
        found["peak_rss_bytes"] = server.peak_rss_bytes()
    return found


async def sweep(server: Server, args: argparse.Namespace, *, seeded: bool) -> dict[str, Any]:
    found = {}
    for num_clients in args.clients:
        figures = await load.throughput(server, num_clients, args.tokens, seeded=seeded)
        found[str(num_clients)] = figures
        kind = "seeded, " if seeded else ""
        say(f"  {server.system.name}: {kind}{num_clients} clients, {figures['tok_s']:.1f} tok/s")
    return found


def engine_round(model: Path, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """The engine in a process of its own, without HTTP."""
    command = [sys.executable, "-m", "mantou", "bench", str(model), "--json"]
    command += ["--clients", str(ENGINE_CLIENTS), "--max-tokens", str(args.tokens), "--prompt-tokens", "0"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    say(f"  bare engine: {ENGINE_CLIENTS} rows, {found['runs'][0]['tok_s']:.1f} tok/s")
    return {"round": number, "clients": ENGINE_CLIENTS, **found["runs"][0]}


async def soak_one(system: System, model: Path, num_requests: int) -> dict[str, int]:
    """Memory over many requests; a prompt cache is off, because it fills up to its budget by design."""
    if system.name == "mantou":
        system = System(system.name, [*system.command, "--prompt-cache", "0"])
    async with running(system, model) as server:
        await load.start(server)
        return await load.soak(server, sorted({min(100, num_requests), num_requests}))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = model_folder(args.model)
    known = systems(shlex.split(args.mantou_args))
    chosen = [known[name] for name in args.systems] + [other(peer) for peer in args.peer]
    settings = {name: getattr(args, name) for name in ("rounds", "clients", "tokens", "mantou_args", "soak")}
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "model": model.name,
        "settings": settings,
        "rounds": [],
        "engine": [],
        "soak": {},
    }
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        for system in chosen if number % 2 == 0 else reversed(chosen):
            result["rounds"].append(await one_round(system, model, number, args))
        if not args.no_engine and ENGINE_CLIENTS in args.clients and "mantou" in args.systems:
            result["engine"].append(engine_round(model, number, args))
    for system in chosen:
        if args.soak and (args.soak_all or system.name == "mantou"):
            say(f"memory over {args.soak} requests: {system.name}")
            result["soak"][system.name] = await soak_one(system, model, args.soak)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    result = asyncio.run(measure(args))
    print(report.table(result))
    output = args.output
    if output is None and not args.quick:
        output = RESULTS / f"{result['date'][:10]}.json"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
        say(f"wrote {output}; `make docs` puts it into docs/performance/README.md")
    if not args.no_cache and "mantou" in args.systems:
        cache.main(["--model", args.model, *(["--quick"] if args.quick else [])])
    return 0


if __name__ == "__main__":
    sys.exit(main())
