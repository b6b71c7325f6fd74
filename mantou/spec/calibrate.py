"""Measures what a decode step costs on this machine, once a model and machine. Knows forwards, no requests."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from mantou.models.runner import Runner
from mantou.protocols import Group
from mantou.spec.cost import Cell, StepCosts

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16)
BUDGET_S = 0.7
_VERSION = 2  # of what a file holds


def step_costs(runner: Runner, max_rows: int, *, identity: str, folder: Path | None) -> StepCosts:
    """The costs that `folder` keeps for `identity` (whatever the times depend on), measured if it has none."""
    path = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json" if folder else None
    cells = _read(path, max_rows) if path else None
    if cells is None:
        cells = measure(runner, max_rows)
        if path:
            _write(path, cells, max_rows)
    return StepCosts.from_cells(cells)


def measure(runner: Runner, max_rows: int, budget_s: float = BUDGET_S) -> dict[Cell, float]:
    """Seconds of forwards over empty rows, small ones first, within about `budget_s`. Leaves the KV empty.

    Two rounds, and the faster time counts: the first may compile, allocate or read weights from the disk, and on a
    shared machine what disturbs one round is mostly gone in the other.
    """
    started = time.perf_counter()
    cells: dict[Cell, float] = {}
    for rows, width in _grid(max_rows, runner.max_width):
        runner.kv.resize(max(rows, runner.kv.num_slots))
        cells[rows, width] = _forward_s(runner, rows, width)
        # A model too large for the budget still needs two widths.
        if len(cells) > 1 and time.perf_counter() - started > budget_s / 2:
            break
    again = {cell: _forward_s(runner, *cell) for cell in cells}
    runner.kv.resize(0)
    return {cell: min(seconds, again[cell]) for cell, seconds in cells.items()}


def _grid(max_rows: int, max_width: int) -> Iterator[Cell]:
    counts = [1]
    while counts[-1] < max_rows:
        counts.append(min(counts[-1] * 2, max_rows))
    cells = [(r, w) for r in counts for w in WIDTHS if w <= max_width]
    yield from sorted(cells, key=lambda cell: (cell[0] * cell[1], cell[0]))


def _forward_s(runner: Runner, rows: int, width: int) -> float:
    started = time.perf_counter()
    _, logits = runner.forward(Group(0, width, (width,) * rows), [[0] * width] * rows, None)
    mx.eval(mx.argmax(logits, axis=-1), runner.kv.arrays())
    runner.abort()
    return time.perf_counter() - started


def _read(path: Path, max_rows: int) -> dict[Cell, float] | None:
    try:
        held = json.loads(path.read_text("utf-8"))
        if held["version"] != _VERSION or held["max_rows"] != max_rows:
            return None
        cells = {(int(r), int(w)): float(s) for r, w, s in held["cells"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); the costs of a step are measured again", path, error)
        return None
    return cells if (1, 1) in cells and all(seconds > 0 for seconds in cells.values()) else None


def _write(path: Path, cells: dict[Cell, float], max_rows: int) -> None:
    held = {
        "version": _VERSION,
        "max_rows": max_rows,
        "cells": [[rows, width, round(seconds, 7)] for (rows, width), seconds in cells.items()],
    }
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(held), "utf-8")
        draft.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s); the next start measures again", path, error)
