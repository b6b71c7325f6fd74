"""`python -m tests.bench.sharing MODEL`: decoding on a machine that others use too.

One core kept busy by another program must leave decoding at least 70 % of its speed with one thread, and two engines
side by side must share fairly. Each figure is a bare engine (`mantou bench`) in a process of its own; the rounds are
interleaved. Knows no kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HOG = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"


def engine(model: str, tokens: int, *flags: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "mantou",
        "bench",
        model,
        "--json",
        "--clients",
        "1",
        "--prompt-tokens",
        "0",
    ]
    command += ["--max-tokens", str(tokens), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def tok_s(process: subprocess.Popen[str]) -> float:
    out, _ = process.communicate()
    return float(json.loads(out)["runs"][0]["tok_s"])


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another program on the last core of this process's set."""
    core = max(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", HOG % core])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def one_round(model: str, tokens: int) -> dict[str, float]:
    found = {
        "alone": tok_s(engine(model, tokens)),
        "one_thread": tok_s(engine(model, tokens, "--threads", "1")),
    }
    with busy_core():
        found["busy_core"] = tok_s(engine(model, tokens))
    found["first_of_two"], found["second_of_two"] = map(tok_s, [engine(model, tokens) for _ in range(2)])
    return found


def table(rounds: Sequence[dict[str, float]]) -> str:
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    kept = statistics.median(one["busy_core"] / one["one_thread"] for one in rounds)
    pairs = [(one["first_of_two"], one["second_of_two"]) for one in rounds]
    fair = statistics.median(min(pair) / max(pair) for pair in pairs)
    both = statistics.median(sum(pair) / one["alone"] for pair, one in zip(pairs, rounds, strict=True))
    lines = ["| decode, 1 row | tok/s |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {value:.0f} |" for name, value in middle.items()]
    lines += ["", f"A busy core leaves {kept:.0%} of the speed of one thread (>= 70 %)."]
    lines += [
        f"Of two engines the slower has {fair:.0%} of the faster; together they do {both:.0%} of one alone."
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = [one_round(args.model, args.tokens) for _ in range(args.rounds)]
    print(table(rounds))
    if args.output:
        args.output.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
