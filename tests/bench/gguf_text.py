"""`python -m tests.bench.gguf_text`: greedy text of one GGUF file in mantou and in another server.

Texts part at the first near-tie that two arithmetics round differently, so the figure is how far they go together, not
whether they are equal. Knows no figures of speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import urllib.request
from pathlib import Path

from mantou.cli.bench import OPENINGS
from tests.bench.process import System, running

QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis in two sentences.",
    "Write a Python function that adds two numbers.",
    "Name three colours.",
)


def ask(port: int, path: str, body: dict[str, object]) -> str:
    data = json.dumps({**body, "temperature": 0.0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def together(a: str, b: str) -> int:
    """Characters before two texts part."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


async def texts(system: System, model: Path, num_tokens: int) -> list[str]:
    async with running(system, model) as server:
        await server.ready()
        chats = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": question}]})
            for question in QUESTIONS
        ]
        plain = [("/v1/completions", {"prompt": opening}) for opening in OPENINGS]
        wanted = [(path, {**body, "max_tokens": num_tokens}) for path, body in (*chats, *plain)]
        return [await asyncio.to_thread(ask, server.port, path, body) for path, body in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("peer", help="the other server, e.g. 'llama-server -m FILE --port {port}'")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    mantou = System("mantou", [sys.executable, "-m", "mantou", "serve", "{model}", "--port", "{port}"])
    peer = System("peer", shlex.split(args.peer))
    ours = asyncio.run(texts(mantou, args.gguf, args.tokens))
    theirs = asyncio.run(texts(peer, args.gguf, args.tokens))
    shared = [together(a, b) for a, b in zip(ours, theirs, strict=True)]
    for prompt, a, same in zip((*QUESTIONS, *OPENINGS), ours, shared, strict=True):
        print(f"{same:5} of {len(a):5} characters  {prompt}")
    whole = sum(same == len(a) for same, a in zip(shared, ours, strict=True))
    share = sum(shared) / sum(map(len, ours))
    print(f"{whole} of {len(ours)} texts are equal; they go together for {share:.0%} of all characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
