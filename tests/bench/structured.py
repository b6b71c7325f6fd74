"""What grammars cost, and whether they hold: `make structured` runs it against real servers of the starter model.

Suite: every schema of tests/unit/schema_cases.py, 8 at a time, with 8-bit KV and drafts; finished answers are checked.
Cost: 8 clients write texts of one length, free and constrained, in turn in one process, each round there and back, so
that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

from tests.real import Server, serving, starter_folder
from tests.unit.schema_cases import cases

CLIENTS = 8
Body = Mapping[str, Any]


def _chat(server: Server, text: str, body: Body) -> tuple[str, str, int]:
    """(answer, why it ended, tokens)"""
    answer = server.post({"messages": [{"role": "user", "content": text}], **body})
    found = answer.raise_for_status().json()
    choice = found["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], found["usage"]["completion_tokens"]


def suite(server: Server, max_tokens: int) -> Counter[str]:
    """Ends of all answers; raises for a finished one that is not valid."""

    def one(case: tuple[str, dict[str, Any]]) -> str:
        name, schema = case
        wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        text, end, _ = _chat(
            server,
            f"Write an example of {name} as JSON.",
            {"response_format": wish, "max_tokens": max_tokens, "temperature": 0.7, "seed": 7},
        )
        if end == "stop":
            jsonschema.validate(json.loads(text), schema)
        return end

    with ThreadPoolExecutor(CLIENTS) as pool:
        return Counter(pool.map(one, cases()))


def rate(server: Server, body: Body) -> float:
    """Tokens a second of 8 clients that all write equally long texts."""
    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(pool.map(lambda n: _chat(server, f"Tell a story about {n} dogs.", body), range(CLIENTS)))
    return sum(tokens for *_, tokens in done) / (time.perf_counter() - started)


def cost(server: Server, tokens: int, rounds: int) -> dict[str, float]:
    """Medians over rounds: tokens a second of the free texts, and the time of constrained ones over theirs."""
    # No end of sequence before the limit: neither the free text nor the constrained one may stop early.
    ends = {"0": -1000, "2": -1000}
    plain = {"max_tokens": tokens, "temperature": 0.8, "seed": 1, "speculation": False, "logit_bias": ends}
    shapes: dict[str, Body] = {
        "free": plain,
        "string": plain | {"guided_json": {"type": "string", "minLength": 10_000, "maxLength": 20_000}},
        "object": plain
        | {"guided_json": {"type": "array", "items": _ITEM, "minItems": 500, "maxItems": 600}},
    }
    for body in shapes.values():
        rate(server, body)
    times: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(rounds):
        seconds = dict.fromkeys(shapes, 0.0)
        for name in (*shapes, *reversed(shapes)):
            seconds[name] += 1 / rate(server, shapes[name])
        for name, spent in seconds.items():
            times[name].append(spent)
    over_free = {
        f"{name} over free": statistics.median(a / b for a, b in zip(times[name], times["free"], strict=True))
        for name in shapes
        if name != "free"
    }
    return {"free": 2 / statistics.median(times["free"]), **over_free}


_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make structured", description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("suite", "cost"))
    args = parser.parse_args(argv)
    report: dict[str, Any] = {}
    parts: dict[str, tuple[tuple[str, ...], Callable[[Server], Any]]] = {
        "suite": (("--kv-quant", "8"), lambda server: dict(suite(server, 400))),
        "cost": ((), lambda server: cost(server, args.tokens, args.rounds)),
    }
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, (flags, measure) in parts.items():
            if args.only in (None, name):
                with serving(home, starter_folder(), "--cache-dir", home / "models", *flags) as server:
                    report[name] = measure(server.ready())
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
