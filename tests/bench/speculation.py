"""`python -m tests.bench.speculation`: decode speed with and without drafts, on one engine in this process.

Three loads repeat what their prompt holds (a file with one name changed, a quoted passage, records as JSON), two do
not: chats, which learned drafts are for, and random text. Every load runs in turn without and with drafts, so that a
machine that slows down slows both; what is compared is the time between the first token and the last. `--record` writes
docs/performance/speculation/DATE.json. Knows no HTTP.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mantou import build
from mantou.config import STARTER, Config
from mantou.data import Request, Sampling, Speculation, TokenEvent, Usage
from mantou.progress import ProgressBoard
from tests.bench.__main__ import machine
from tests.bench.load import WORDS

KINDS = ("edit", "quote", "json", "random")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "performance" / "speculation"
RANDOM_GOAL = 0.97
GOALS = {1: 2.0, 8: 1.3}  # clients -> gain of copies, for the loads that repeat


def edit(number: int) -> str:
    """A file of about a thousand tokens, and the beginning of its copy with a new name."""
    dice = random.Random(number)
    lines = ["class Account:", '    """An account of a customer."""', ""]
    for method in dice.sample(WORDS, 10):
        lines += [
            f"    def {method}(self, amount: int) -> int:",
            f'        """Books the {method} and returns what is left."""',
            f"        self.{method}_total = self.{method}_total + amount",
            f"        self.log.append(({method!r}, amount))",
            f"        return self.balance - self.{method}_total",
            "",
        ]
    text = "\n".join(lines)
    renamed = text.replace("Account", "Ledger", 1)
    return f"Rename the class Account to Ledger.\n\nBefore:\n{text}\n\nAfter:\n{renamed[:120]}"


def quote(number: int) -> str:
    """Passages of this project's decision records, and the beginning of a quotation of one."""
    records = sorted((Path(__file__).resolve().parents[2] / "docs" / "adr").glob("00[1-8]*.md"))
    passages = [
        part for record in records for part in record.read_text("utf-8").split("\n\n") if len(part) > 300
    ]
    chosen = random.Random(number).sample(passages, 6)
    every = "\n\n".join(chosen)
    return f"{every}\n\nThe passage was quoted word for word:\n{chosen[2][:60]}"


def records(number: int) -> str:
    """Records as JSON, and the beginning of the same list."""
    dice = random.Random(number)
    rows = [
        {
            "id": 1000 + i,
            "name": dice.choice(WORDS),
            "place": dice.choice(WORDS),
            "count": dice.randrange(100),
        }
        for i in range(24)
    ]
    text = json.dumps(rows, indent=1)
    return f"Input:\n{text}\n\nOutput (unchanged):\n{text[:200]}"


def nonsense(number: int) -> str:
    dice = random.Random(number)
    return "".join(f"{dice.choice(WORDS)} {dice.randrange(10**6)} " for _ in range(8))


def chat(number: int) -> str:
    """A question to the starter model."""
    path = Path(__file__).resolve().parent / "texts" / "questions.txt"
    question = random.Random(number).choice(path.read_text("utf-8").splitlines())
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return f"{turns}<|im_start|>assistant\n"


LOADS = {"chat": chat, "edit": edit, "quote": quote, "json": records, "random": nonsense}


@dataclass
class Clock:
    """A mailbox that notes when each request's tokens come."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)
    left: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def put(self, events: Sequence[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.error:
                print(event.error, file=sys.stderr)
            self.first.setdefault(event.request_id, now)
            self.last[event.request_id] = now
            self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            if event.finish is not None:
                assert event.usage is not None
                self.usages[event.request_id] = event.usage
                self.left -= 1
        if not self.left:
            self.done.set()


class Bench:
    def __init__(self, config: Config) -> None:
        self.clock = Clock()
        board, ready = ProgressBoard(), threading.Event()
        self._assembly = build.assemble(build.obtain_folder(config, board), config)
        self._engine = build.make_engine(
            self._assembly,
            self.clock,
            board,
            on_ready=lambda _: ready.set(),
            on_failed=lambda e: sys.exit(e.message),
        )
        self._engine.start()
        ready.wait()
        assert self._assembly.info is not None
        self.notes = self._assembly.info.notes
        self._serial = 0

    def close(self) -> None:
        self._engine.close()

    def text(self, tokens: Sequence[int]) -> str:
        return self._assembly.tokenizer.decode(tokens)

    def run(self, load: str, clients: int, num_tokens: int, kind: str, number: int) -> dict[str, Any]:
        """`clients` requests at once; their decode time, tokens a second over all of them."""
        sampling = Sampling(temperature=1.0) if load == "random" else Sampling()
        encode = self._assembly.tokenizer.encode
        wanted = []
        for i in range(clients):
            self._serial += 1
            prompt = tuple(encode(LOADS[load](number * 100 + i), add_special_tokens=False))
            request = Request(str(self._serial), prompt, replace(sampling, seed=i), num_tokens)
            wanted.append(replace(request, speculation=Speculation(kind)))
        # Prompts first: what is measured is decoding alone.
        self._wait([replace(r, id=f"p{r.id}", max_tokens=1) for r in wanted])
        self._wait(wanted)
        clock = self.clock
        started = max(clock.first[r.id] for r in wanted)
        seconds = max(clock.last[r.id] for r in wanted) - started
        made = sum(len(clock.tokens[r.id]) - 1 for r in wanted)
        usages = [clock.usages[r.id].speculation for r in wanted]
        drafted = sum(u.drafted for u in usages if u)
        accepted = sum(u.accepted for u in usages if u)
        return {
            "tok_s": made / seconds,
            "accepted": accepted / drafted if drafted else None,
            "drafted": drafted,
            "tokens": [clock.tokens[r.id] for r in wanted],
        }

    def _wait(self, wanted: Sequence[Request]) -> None:
        self.clock.left = len(wanted)
        self.clock.done.clear()
        for request in wanted:
            self._engine.submit(request)
        self.clock.done.wait()


def compare(bench: Bench, load: str, clients: int, num_tokens: int, rounds: int, kind: str) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"off": [], kind: []}
    for number in range(rounds):
        order = ("off", kind) if number % 2 == 0 else (kind, "off")
        for which in order:
            found[which].append(bench.run(load, clients, num_tokens, which, number))
    for plain, drafted in zip(found["off"], found[kind], strict=True):
        assert plain["tokens"] == drafted["tokens"], "drafts changed an answer"
    off, on = (statistics.median(run["tok_s"] for run in found[which]) for which in ("off", kind))
    accepted = [run["accepted"] for run in found[kind] if run["accepted"] is not None]
    return {
        "load": load,
        "clients": clients,
        "kind": kind,
        "off_tok_s": round(off, 1),
        "on_tok_s": round(on, 1),
        "gain": round(on / off, 3),
        "accepted": round(statistics.mean(accepted), 3) if accepted else None,
        "drafted": sum(run["drafted"] for run in found[kind]),
    }


def goal(row: Mapping[str, Any]) -> float | None:
    """The gain that copies must reach, None where none is set."""
    if row["kind"] != "ngram":
        return None
    return RANDOM_GOAL if row["load"] == "random" else GOALS.get(row["clients"])


def table(result: Mapping[str, Any]) -> str:
    """Markdown, for docs/performance/README.md."""
    host = result["machine"]
    where = (
        f"{result['model']} on {host['system']}, {host['cores']} cores ({result['ops']}); mlx {host['mlx']}"
    )
    how = f"{result['rounds']} interleaved rounds, {result['tokens']} tokens each"
    lines = [
        f"Decoding, tokens a second: {where}; medians of {how}; load average {host['load_average_before']}.",
        "",
        "| load | clients | drafts | without, tok/s | with | gain | must reach | guesses that held |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["speculation"]:
        least = goal(row)
        verdict = "" if least is None else f">= {least:g}x {'yes' if row['gain'] >= least else '**no**'}"
        held = "-" if row["accepted"] is None else f"{row['accepted']:.0%} of {row['drafted']}"
        lines.append(
            f"| {row['load']} | {row['clients']} | {row['kind']} | {row['off_tok_s']} | {row['on_tok_s']} | "
            f"{row['gain']:.2f}x | {verdict} | {held} |"
        )
    return "\n".join(lines)


def record(
    results: Sequence[Mapping[str, Any]],
    args: argparse.Namespace,
    host: Mapping[str, Any],
    notes: Sequence[str],
) -> None:
    result = {
        "machine": host,
        "model": args.model,
        "ops": "; ".join(notes),
        "rounds": args.rounds,
        "tokens": args.tokens,
        "speculation": results,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.speculation", description=__doc__)
    parser.add_argument("--model", default=STARTER)
    parser.add_argument("--draft-model")
    parser.add_argument("--kind", default="ngram")
    parser.add_argument("--dtype", help="of the weights; the default is as stored")
    parser.add_argument("--num-draft-tokens", type=int)
    parser.add_argument("--loads", default=",".join(KINDS))
    parser.add_argument(
        "--clients", default="1,8", help="for the loads that repeat; random text runs with 16"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write the figures into docs/performance")
    parser.add_argument("--show", action="store_true", help="print the beginning of each answer")
    args = parser.parse_args(argv)
    config = Config(
        model=args.model,
        draft_model=args.draft_model,
        num_draft_tokens=args.num_draft_tokens,
        dtype=args.dtype,
        batch=16,
    )
    host = machine()
    bench = Bench(config)
    try:
        bench.run("random", 2, 8, "off", 0)
        results = []
        for load in args.loads.split(","):
            counts = [16] if load == "random" else [int(count) for count in args.clients.split(",")]
            for clients in counts:
                results.append(compare(bench, load, clients, args.tokens, args.rounds, args.kind))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        if args.show:
            for name, tokens in list(bench.clock.tokens.items())[:40]:
                print(name, repr(bench.text(tokens)[:300]), file=sys.stderr)
    finally:
        bench.close()
    print(json.dumps(results))
    if args.record:
        record(results, args, host, bench.notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
