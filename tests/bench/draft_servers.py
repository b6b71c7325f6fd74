"""`python -m tests.bench.draft_servers`: mantou and mlx_lm.server with one and the same draft model, in turn.

The draft is made here: the first layers of the model, under its own embedding, norm, head and tokenizer, so that both
servers take it. Its guesses are poor; what is compared is what a server does with a draft model when clients share it.
mlx_lm.server answers one request after the other once it has one, so it is also measured without, where it batches.
Writes docs/performance/draft-servers/DATE.json. Knows no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.bench import load
from tests.bench.process import System, running, systems
from tests.real import starter_folder

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "performance" / "draft-servers"
PEER = "mlx_lm.server"
ALONE = f"{PEER} without a draft"
NAMES = ("mantou", PEER, ALONE)


def first_layers(model: Path, folder: Path, count: int) -> Path:
    """A model folder of the first `count` layers of another one, the rest as it is."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copy(file, folder / file.name)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}), "utf-8")
    weights: dict[str, mx.array] = {}
    for file in sorted(model.glob("*.safetensors")):
        read: Any = mx.load(str(file))
        weights |= {name: array for name, array in read.items() if _layer(name) < count}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


async def measure(
    system: System, model: Path, clients: Sequence[int], num_tokens: int
) -> dict[int, dict[str, float]]:
    async with running(system, model) as server:
        await server.ready()
        await load.cold_first_token(server)
        found = {
            count: dict(await load.throughput(server, count, num_tokens, seeded=False)) for count in clients
        }
    print(system.name, {count: round(run["tok_s"], 1) for count, run in found.items()}, file=sys.stderr)
    return found


def table(result: Mapping[str, Any]) -> str:
    """Markdown, for docs/performance/README.md."""
    rows = [
        f"| {row['clients']} | {row['mantou_tok_s']} | {row['mlx_lm_tok_s']} | {row['mantou / mlx_lm.server']} "
        f"| {row['mlx_lm_without_tok_s']} |"
        for row in result["draft_servers"]
    ]
    draft = f"{result['draft']}, {result['num_draft_tokens']} tokens ahead"
    versions = f"mlx-lm {result['mlx_lm']}, mlx {result['mlx']}"
    lines = [
        f"One draft model for both ({draft}), {result['tokens']} tokens each, rounds: {result['rounds']}; {versions}.",
        "",
        "| clients | mantou, tok/s | mlx_lm.server, tok/s | ratio | mlx_lm.server without a draft, tok/s |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.draft_servers", description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the draft model")
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    model, clients = starter_folder(), [int(count) for count in args.clients.split(",")]
    runs: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as scratch:
        draft = first_layers(model, Path(scratch) / "draft", args.layers)
        flags = ["--draft-model", str(draft), "--num-draft-tokens", str(args.num_draft_tokens)]
        every = systems(["--batch", "16", "--draft-kind", "model", *flags])
        peer = every[PEER]
        every[ALONE] = System(ALONE, peer.command)
        every[PEER] = System(peer.name, [*peer.command, *flags])
        for number in range(args.rounds):
            for name in NAMES if number % 2 == 0 else NAMES[::-1]:
                runs[name].append(asyncio.run(measure(every[name], model, clients, args.tokens)))
    rows = []
    for count in clients:
        mine, theirs, alone = (statistics.median(run[count]["tok_s"] for run in runs[name]) for name in NAMES)
        rows.append(
            {
                "clients": count,
                "mantou_tok_s": round(mine, 1),
                "mlx_lm_tok_s": round(theirs, 1),
                "mantou / mlx_lm.server": round(mine / theirs, 2),
                "mlx_lm_without_tok_s": round(alone, 1),
            }
        )
    result = {
        "model": model.name,
        "draft": f"its first {args.layers} layers",
        "num_draft_tokens": args.num_draft_tokens,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "mlx_lm": version("mlx_lm"),
        "mlx": version("mlx"),
        "draft_servers": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
