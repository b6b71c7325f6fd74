"""From a result of the prompt cache's bench to a Markdown table. Knows no servers and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One goal: `value` is a ratio."""

    name: str
    shown: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def first_token(found: Result) -> list[Line]:
    cold = found["cold_s"]
    prompt = f"first token, {found['prompt_tokens']}-token prompt"
    memory, disk = median(found["memory_s"]), median(found["disk_s"])
    return [
        Line(f"{prompt}, known, in memory", f"{memory:.3g} s of {cold:.3g} s cold", memory / cold, 0.02),
        Line(f"{prompt}, known, on SSD after a restart", f"{disk:.3g} s", disk / cold, 0.10),
    ]


def conversation(found: Result) -> list[Line]:
    turns = found["turns"]
    computed = sum(turn["prompt_tokens"] - turn["cached_tokens"] for turn in turns)
    answers = sum(turn["completion_tokens"] for turn in turns[:-1])
    new = (
        turns[-1]["prompt_tokens"] - answers
    )  # every token of the history came in some turn, or was an answer
    name = f"prompt tokens computed, {len(turns)} turns of an agent, {turns[-1]['prompt_tokens']} tokens"
    return [Line(name, f"{computed} of {new} new", computed / new, 1.1)]


def sharing(found: Result) -> list[Line]:
    one, eight = found["one_bytes"], found["eight_bytes"]
    name = f"memory of 8 conversations, {found['prompt_tokens']}-token prompts"
    return [Line(name, f"{eight / 2**20:.0f} MiB, one {one / 2**20:.0f} MiB", eight / one, 1.2)]


def spilling(found: Result) -> list[Line]:
    plain, writing = (median(found["tok_s"][name]) for name in ("memory", "disk"))
    name = f"8 clients while {found['written_bytes'] / 2**20:.0f} MiB go to the SSD"
    return [Line(name, f"{writing:.0f} tok/s, without {plain:.0f}", writing / plain, 0.95, at_least=True)]


def steps(found: Result) -> list[Line]:
    """A step is its median and what the cache adds: at most twice the median means at most a median added."""
    lines = []
    for kind in found["phases"]:
        shown = f"median {kind['median_s'] * 1e3:.1f} ms, cache at most {kind['store_max_s'] * 1e3:.1f} ms"
        value = (kind["median_s"] + kind["store_max_s"]) / kind["median_s"]
        lines.append(Line(f"longest step by the cache: {kind['name']}", shown, value, 2.0))
    return lines


SECTIONS = {
    "first_token": first_token,
    "conversation": conversation,
    "sharing": sharing,
    "spilling": spilling,
    "steps": steps,
}


def row(line: Line) -> str:
    ratio = f"{line.value:.1%}" if line.bound < 1 else f"{line.value:.2f}x"
    bound = f"{line.bound:.0%}" if line.bound < 1 else f"{line.bound:g}x"
    sign = ">=" if line.at_least else "<="
    return f"| {line.name} | {line.shown} | {ratio} | {sign} {bound} {'yes' if line.reached else '**no**'} |"


def summary(name: str, found: Result) -> str:
    return "; ".join(f"{line.shown} = {line.value:.3g}" for line in SECTIONS[name](found))


def table(result: Result) -> str:
    machine = result["machine"]
    heading = (
        f"Prompt cache: {result['model']} on {machine['system']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; mantou {machine['mantou']}, mlx {machine['mlx']}, Python "
        f"{machine['python']}; {result['date'][:10]}."
    )
    lines = [
        line
        for name, make in SECTIONS.items()
        if name in result["cache"]
        for line in make(result["cache"][name])
    ]
    return "\n".join(
        [heading, "", "| | mantou | ratio | must reach |", "|---|---|---|---|", *map(row, lines)]
    )
