"""From a result of `tests.bench.paged` to a Markdown table. Knows no arrays and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(result: Mapping[str, Any]) -> str:
    notes = "; ".join(result["notes"])
    heading = (
        f"Rows in blocks of {result['block']} tokens against a buffer a row: {result['shape']} llama of random "
        f"weights, {result['dtype']}, on {result['device']} ({notes}), mlx {result['mlx']}; medians of "
        f"{result['rounds']} interleaved rounds of {result['steps']} decode steps."
    )
    lines = [
        heading,
        "",
        "| rows | KV | memory, buffers | blocks | ratio | tok/s, buffers | blocks | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["paged"]:
        one, other = row["buffers"], row["blocks"]
        lines.append(
            f"| {row['load']} | {row['codec']} | {_size(one)} | {_size(other)} | {row['memory_ratio']:.2f} | "
            f"{one['tok_s']:.3g} | {other['tok_s']:.3g} | {1 / row['time_ratio']:.2f} |"
        )
    return "\n".join(lines)


def _size(found: Mapping[str, Any]) -> str:
    return f"{found['kv_bytes'] / 2**30:.3g} GiB"
