"""From a result (see docs/performance/*.json) to a Markdown table. Knows no servers and no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

MANTOU, PEER = "mantou", "mlx_lm.server"
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both systems; None where it was not measured."""

    name: str
    mantou: float | None
    peer: float | None
    unit: str
    target: str = ""
    reached: Callable[[float, float], bool] | None = None  # (mantou, peer) -> whether the target holds


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def of_rounds(result: Result, system: str, read: Callable[[Mapping[str, Any]], float | None]) -> float | None:
    """The median over the rounds of one system."""
    return middle(read(one) for one in result["rounds"] if one["system"] == system)


def peers(result: Result) -> list[str]:
    """The systems beside mantou, in order of appearance."""
    return list(dict.fromkeys(one["system"] for one in result["rounds"] if one["system"] != MANTOU))


def at_most(factor: float) -> dict[str, Any]:
    return {"target": f"<= {factor:g}x", "reached": lambda mantou, peer: mantou <= factor * peer}


def at_least(factor: float) -> dict[str, Any]:
    return {"target": f">= {factor:g}x", "reached": lambda mantou, peer: mantou >= factor * peer}


def rows(result: Result, peer: str = PEER) -> list[Row]:
    """The targets are those against mlx_lm.server; another peer is shown without."""

    def both(result: Result, name: str, unit: str, read: Callable[[Any], float | None], **target: Any) -> Row:
        kept = target if peer == PEER else {}
        return Row(name, of_rounds(result, MANTOU, read), of_rounds(result, peer, read), unit, **kept)

    found = [
        both(result, "start to ready", "s", lambda r: r["ready_s"], **at_most(0.6)),
        both(result, "start to first token", "s", lambda r: r["cold_first_token_s"], **at_most(1.0)),
        both(result, "first token, short prompt", "s", lambda r: middle(r["ttft_short_s"])),
        both(result, long_name(result), "s", lambda r: middle(r["ttft_long_s"])),
    ]
    for clients in result["settings"]["clients"]:
        target = at_least(1.0) if clients in (1, 8, 16) else {}
        found.append(both(result, f"{clients} clients", "tok/s", at(clients, "throughput"), **target))
    for clients in result["settings"]["clients"]:
        target = at_least(2.0) if clients in (8, 16) else {}
        name = f"{clients} clients, seeded"
        found.append(both(result, name, "tok/s", at(clients, "throughput_seeded"), **target))
    gib = 2**30
    found.append(both(result, "memory when ready", "GiB", lambda r: r["rss_ready_bytes"] / gib))
    found.append(both(result, "memory at most", "GiB", lambda r: r["peak_rss_bytes"] / gib))
    return [row for row in found if row.mantou is not None or row.peer is not None]


def long_name(result: Result) -> str:
    tokens = middle(one["prompt_tokens_long"] for one in result["rounds"])
    return f"first token, {tokens or 0:.0f}-token prompt"


def at(clients: int, key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda one: one.get(key, {}).get(str(clients), {}).get("tok_s")


def overhead(result: Result) -> float | None:
    """Share of the bare engine's throughput that HTTP costs, 0.03 = 3 %."""
    bare = middle(one["tok_s"] for one in result["engine"])
    if not bare:
        return None
    served = of_rounds(result, MANTOU, at(result["engine"][0]["clients"], "throughput"))
    return None if served is None else 1 - served / bare


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def line(row: Row) -> str:
    ratio, verdict = "-", row.target
    if row.mantou is not None and row.peer:
        ratio = f"{row.mantou / row.peer:.2f}x"
        if row.reached is not None:
            verdict += " yes" if row.reached(row.mantou, row.peer) else " **no**"
    mantou, peer = number(row.mantou, row.unit), number(row.peer, row.unit)
    return f"| {row.name} | {mantou} | {peer} | {ratio} | {verdict} |"


def heading(result: Result) -> str:
    machine, settings = result["machine"], result["settings"]
    return (
        f"{result['model']} on {machine['system']}, {machine['cores']} cores, {machine['memory_gib']} GiB; mantou "
        f"{machine['mantou']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}, Python {machine['python']}; "
        f"{result['date'][:10]}; {settings['rounds']} interleaved rounds, medians; {settings['tokens']} tokens a "
        f"request; load average before: {machine['load_average_before']}."
    )


def comparison(result: Result, peer: str) -> list[str]:
    return [
        "",
        f"| | {MANTOU} | {peer} | ratio | must reach |",
        "|---|---|---|---|---|",
        *(line(row) for row in rows(result, peer)),
    ]


def table(result: Result) -> str:
    """Markdown: the machine, a table for each peer (medians over the rounds), then overhead and memory over time."""
    lines = [heading(result)]
    for peer in peers(result) or [PEER]:
        lines += comparison(result, peer)
    share = overhead(result)
    if share is not None:
        verdict = "yes" if share <= 0.03 else "**no**"
        clients = result["engine"][0]["clients"]
        lines += [
            "",
            f"Server overhead at {clients} clients: {share:.1%} of the bare engine's throughput (<= 3 % {verdict}).",
        ]
    for system, marks in result["soak"].items():
        lines += ["", soak_line(system, marks)]
    return "\n".join(lines)


def soak_line(system: str, marks: Mapping[str, int]) -> str:
    ordered = sorted(marks.items(), key=lambda item: int(item[0]))
    shown = ", ".join(f"{value / 2**20:.0f} MiB after {mark} requests" for mark, value in ordered)
    growth = ordered[-1][1] / ordered[0][1] - 1
    verdict = "yes" if growth <= 0.03 else "**no**"
    return f"Memory of {system}: {shown} ({growth:+.1%}; <= 3 % {verdict})."
