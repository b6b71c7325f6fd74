"""The prompt cache in figures: `python -m tests.bench.cache`, and a part of `make bench`.

Runs mantou alone, as a process, and compares it with itself: a prompt that is known with one that is not, eight
conversations with one, a server that writes to the SSD with one that does not. Knows HTTP only, but for the steps of
the model thread, which cache_steps.py counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import http.client
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import agent, cache_report, client, load
from tests.bench.process import Server, System, running

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "performance" / "prompt-cache"
LONG_WORDS = 7_900  # about 8k tokens, and some are left of the starter's context
SYSTEM_WORDS = 4_000
NUM_CONVERSATIONS = 8
NUM_RESTARTS = 3


@contextlib.asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[Server]:
    """A server that has computed a few tokens already."""
    command = [sys.executable, "-m", "mantou", "serve", "{model}", "--port", "{port}", *flags]
    async with running(System("mantou", command), model) as server:
        await load.start(server)
        await load.throughput(server, 2, 4, seeded=False)
        yield server


def call(server: Server, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    connection = http.client.HTTPConnection(client.HOST, server.port, timeout=600)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        content = json.loads(reply.read())
    finally:
        connection.close()
    if reply.status != 200:
        raise client.Refused(json.dumps(content))
    return content


def forget_pages(folder: Path) -> None:
    """So that files come from the device, where the system lets one ask for that."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# ------------------------------------------------------------------ what is measured
async def first_token(model: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One prompt cold, again from memory, and again after restarts of the server."""
    body = {"prompt": load.long_text(args.long_words), "max_tokens": 2, "temperature": 0.0}
    flags = ("--ssd-cache", str(scratch / "ssd"))

    async def once(server: Server) -> client.Reply:
        return await client.stream(server.port, load.COMPLETIONS, body)

    async with serving(model, *flags) as server:
        cold = await once(server)
        memory = [await once(server) for _ in range(5)]
        call(server, "POST", "/admin/cache/flush")
    disk = []
    for _ in range(args.restarts):
        forget_pages(scratch / "ssd")
        async with serving(model, *flags) as server:
            disk.append(await once(server))
            assert call(server, "GET", "/stats")["ssd_cache"]["restores"] >= 1
    assert cold.cached_tokens == 0
    assert {reply.cached_tokens for reply in (*memory, *disk)} == {cold.prompt_tokens - 1}
    return {
        "prompt_tokens": cold.prompt_tokens,
        "cold_s": cold.ttft_s,
        "memory_s": [reply.ttft_s for reply in memory],
        "disk_s": [reply.ttft_s for reply in disk],
    }


async def conversation(model: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """An agent's turns, each with the whole history: how much of them is computed."""
    folder = agent.folder_for(model, scratch / "agent")
    messages = agent.beginning()
    turns = []
    async with serving(folder, "--ssd-cache", str(scratch / "ssd")) as server:
        for number in range(args.turns):
            messages.append(agent.addition(number))
            body = {"messages": messages, "tools": agent.TOOLS, "max_tokens": agent.ANSWER_TOKENS}
            reply = await asyncio.to_thread(
                call, server, "POST", load.CHAT, {**body, "temperature": 0.0, "session_id": "agent"}
            )
            message, usage = reply["choices"][0]["message"], reply["usage"]
            messages.append({"role": "assistant", "content": message.get("content") or ""})
            details = usage.get("prompt_tokens_details") or {}
            turns.append(
                {
                    "prompt_tokens": usage["prompt_tokens"],
                    "cached_tokens": details.get("cached_tokens") or 0,
                    "completion_tokens": usage["completion_tokens"],
                }
            )
    return {"turns": turns}


async def sharing(model: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes that the store holds after one conversation, and after eight with the same system message."""
    system = {"role": "system", "content": load.long_text(args.system_words)}
    sizes, prompt_tokens = [], 0
    async with serving(model) as server:
        before = call(server, "GET", "/stats")["prompt_cache"]["bytes"]
        for number in range(NUM_CONVERSATIONS):
            messages = [system, {"role": "user", "content": f"{number}. Say something about yourself."}]
            reply = await client.stream(
                server.port, load.CHAT, {"messages": messages, "max_tokens": 24, "temperature": 0.0}
            )
            prompt_tokens = reply.prompt_tokens
            sizes.append(call(server, "GET", "/stats")["prompt_cache"]["bytes"] - before)
    return {"prompt_tokens": prompt_tokens, "one_bytes": sizes[0], "eight_bytes": sizes[-1]}


async def spilling(model: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same load on two servers in turn; one of them writes all that is new to the SSD."""
    speeds: dict[str, list[float]] = {"memory": [], "disk": []}
    async with (
        serving(model) as plain,
        serving(model, "--ssd-cache", str(scratch / "ssd")) as writing,
    ):
        servers = {"memory": plain, "disk": writing}
        for number in range(args.rounds):
            for name in sorted(servers, reverse=bool(number % 2)):
                figures = await load.throughput(servers[name], 8, args.tokens, seeded=False)
                speeds[name].append(figures["tok_s"])
        call(writing, "POST", "/admin/cache/flush")
        stats = call(writing, "GET", "/stats")["ssd_cache"]
    assert stats["spills"] and not stats["failed_spills"]
    return {
        "tok_s": speeds,
        "written_bytes": stats["bytes"],
        "spills": stats["spills"],
        "dropped_spills": stats["dropped_spills"],
    }


async def steps(model: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of the model thread while rows decode and others come, restore, store and leave."""
    command = [sys.executable, "-m", "tests.bench.cache_steps", str(model), str(scratch / "ssd")]
    child = await asyncio.create_subprocess_exec(
        *command, str(args.step_tokens), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
    return dict(json.loads(printed.splitlines()[-1]))


Measure = Callable[[Path, Path, argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]
ITEMS: Mapping[str, Measure] = {
    "first_token": first_token,
    "conversation": conversation,
    "sharing": sharing,
    "spilling": spilling,
    "steps": steps,
}


# ------------------------------------------------------------------ the command
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cache", description=__doc__)
    parser.add_argument("--model", default=None, help="MLX model folder, or what `mantou serve` takes")
    parser.add_argument("--only", default=",".join(ITEMS), help="which to measure; the others are kept")
    parser.add_argument("--quick", action="store_true", help="short prompts: shows that it works")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default prompt-cache/DATE.json, none if --quick"
    )
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(ITEMS):
        parser.error(f"--only takes {', '.join(ITEMS)}, not {', '.join(sorted(unknown))}")
    args.long_words, args.system_words, args.restarts = LONG_WORDS, SYSTEM_WORDS, NUM_RESTARTS
    args.turns, args.rounds, args.tokens, args.step_tokens = agent.NUM_TURNS, 4, 400, 4000
    if args.quick:
        args.long_words, args.system_words, args.restarts = 600, 500, 1
        args.turns, args.rounds, args.tokens, args.step_tokens = 2, 1, 270, 600
    return args


async def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = await ITEMS[name](model, Path(scratch), args)
        print(f"{name}: {cache_report.summary(name, found[name])}", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    from mantou.config import STARTER
    from tests.bench.__main__ import machine, model_folder

    args = parse(argv)
    model = model_folder(args.model or STARTER)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "model": model.name,
        "cache": {},
    }
    output = args.output or (None if args.quick else RESULTS / f"{result['date'][:10]}.json")
    if output is not None and output.exists():
        result["cache"] = json.loads(output.read_text())["cache"]
    result["cache"] |= asyncio.run(measure(model, args))
    print(cache_report.table(result))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
