"""Measures what a decode step costs on this machine, once a model and machine. Knows forwards, no requests."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mantou.models.runner import Runner
from mantou.protocols import Group
from mantou.spec.cost import Cell, StepCosts

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16)
BUDGET_S = 0.7
_VERSION = 3  # of what a file holds

DrawGreedy = Callable[[mx.array], Sequence[mx.array]]  # logits [B, T, V] -> what a step reads of them


@dataclass(frozen=True, slots=True)
class Measured:
    """`cells`: seconds of (rows, tokens a row). `padding`: see StepCosts."""

    cells: Mapping[Cell, float]
    padding: float


def step_costs(
    runner: Runner, draw: DrawGreedy, max_rows: int, *, identity: str, folder: Path | None
) -> StepCosts:
    """The costs that `folder` keeps for `identity` (whatever the times depend on), measured if it has none."""
    path = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json" if folder else None
    found = _read(path, max_rows) if path else None
    if found is None:
        found = measure(runner, draw, max_rows)
        if path:
            _write(path, found, max_rows)
    # A step of one token reads the weights, and reading what rows hold takes as long for each byte: a first estimate.
    held_s = found.cells[1, 1] * runner.plan.token_bytes() / runner.model.weights_bytes
    return StepCosts.from_cells(found.cells, held_s=held_s, padding=found.padding)


def measure(runner: Runner, draw: DrawGreedy, max_rows: int, budget_s: float = BUDGET_S) -> Measured:
    """Forwards over empty rows, small ones first, within about `budget_s` and a quarter. Leaves the KV empty.

    Two rounds, and the faster time counts: the first may compile, allocate or read weights from the disk, and on a
    shared machine what disturbs one round is mostly gone in the other.
    """
    runner.kv.resize(1)
    _forward_s(runner, draw, 1, (1,))  # what a device compiles for its first step is not to use up the time
    started = time.perf_counter()
    cells: dict[Cell, float] = {}
    for rows, width in _grid(max_rows, runner.max_width):
        runner.kv.resize(max(rows, runner.kv.num_slots))
        cells[rows, width] = _forward_s(runner, draw, width, (width,) * rows)
        # A model too large for the budget still needs two widths.
        if len(cells) > 1 and time.perf_counter() - started > budget_s / 2:
            break
    for (rows, width), seconds in tuple(cells.items()):
        cells[rows, width] = min(seconds, _forward_s(runner, draw, width, (width,) * rows))
    padding = _padding(runner, draw, {cell: s for cell, s in cells.items() if s < budget_s / 8})
    runner.kv.resize(0)
    return Measured(cells, padding)


def _padding(runner: Runner, draw: DrawGreedy, cells: Mapping[Cell, float]) -> float:
    """One row as wide as all were in the largest of these steps, the others with a token each: where that is between
    paying for what rows feed and paying for the widest row each. Without such steps padding is taken to be dear."""
    wide = [(r, w) for r, w in cells if r > 1 and w > 2 and (r, 1) in cells]
    if not wide or not (runner.ragged_widths and runner.ragged_offsets):
        return 1.0
    rows, width = max(wide, key=lambda cell: cell[0] * cell[1])
    num_tokens = (width, *[1] * (rows - 1))
    seconds = min(_forward_s(runner, draw, width, num_tokens) for _ in range(2))
    free = cells[rows, 1] + (cells[rows, width] - cells[rows, 1]) * (sum(num_tokens) / rows - 1) / (width - 1)
    return min(max((seconds - free) / max(cells[rows, width] - free, 1e-9), 0.0), 1.0)


def _grid(max_rows: int, max_width: int) -> Iterator[Cell]:
    counts = [1]
    while counts[-1] < max_rows:
        counts.append(min(counts[-1] * 2, max_rows))
    cells = [(r, w) for r in counts for w in WIDTHS if w <= max_width]
    yield from sorted(cells, key=lambda cell: (cell[0] * cell[1], cell[0]))


def _forward_s(runner: Runner, draw: DrawGreedy, width: int, num_tokens: tuple[int, ...]) -> float:
    started = time.perf_counter()
    tokens = [[0] * n for n in num_tokens]
    _, logits = runner.forward(Group(0, width, num_tokens), tokens, None, rewindable=width > 1)
    mx.eval(draw(logits), runner.kv.arrays())
    runner.abort()
    return time.perf_counter() - started


def _read(path: Path, max_rows: int) -> Measured | None:
    try:
        held = json.loads(path.read_text("utf-8"))
        if held["version"] != _VERSION or held["max_rows"] != max_rows:
            return None
        cells = {(int(r), int(w)): float(s) for r, w, s in held["cells"]}
        padding = float(held["padding"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); the costs of a step are measured again", path, error)
        return None
    fits = (1, 1) in cells and all(seconds > 0 for seconds in cells.values()) and 0 <= padding <= 1
    return Measured(cells, padding) if fits else None


def _write(path: Path, found: Measured, max_rows: int) -> None:
    held = {
        "version": _VERSION,
        "max_rows": max_rows,
        "cells": [[rows, width, round(seconds, 7)] for (rows, width), seconds in found.cells.items()],
        "padding": round(found.padding, 4),
    }
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(held), "utf-8")
        draft.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s); the next start measures again", path, error)
