"""Which kind of draft model a folder holds, and how each kind is loaded. The one list of heads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mantou.errors import ModelError
from mantou.models.checkpoint import weight_files
from mantou.models.load import read_weights
from mantou.spec.cost import Cell, StepCosts
from mantou.spec.heads.assistant import Assistant
from mantou.spec.heads.blocks import BlockDraft
from mantou.spec.heads.dflash2 import DFlash2
from mantou.spec.heads.donors import DonorDraft
from mantou.spec.heads.dspark import DSpark
from mantou.spec.heads.eagle import Eagle
from mantou.spec.heads.eagle3 import Eagle3
from mantou.spec.heads.mtp import Mtp, layout_of
from mantou.spec.heads.parts import Target
from mantou.spec.heads.provider import HeadDraft

Provider = type[HeadDraft[Any]] | type[DonorDraft]
MODEL = "model"
MTP = "mtp"  # the only kind that a model's own folder may hold


class Kind(NamedTuple):
    load: Callable[[Path, Target], Any]  # the graph, which its provider takes
    provider: Provider


HEADS: Mapping[str, Kind] = {
    "eagle": Kind(Eagle, HeadDraft),
    "eagle3": Kind(Eagle3, HeadDraft),
    "dspark": Kind(DSpark, BlockDraft),
    "dflash2": Kind(DFlash2, BlockDraft),
    MTP: Kind(Mtp, HeadDraft),
    "assistant": Kind(Assistant, DonorDraft),
}
# What only the weights of this kind are called; the first that fits.
_SIGNS = {
    "pre_projection.weight": "assistant",
    "midlayer.hidden_norm.weight": "eagle3",
    "layers.0.hidden_norm.weight": "eagle3",
    "candidate_selector.hidden_projection.weight": "dflash2",
    "hidden_norm.weight": "dspark",
    "fc.weight": "eagle",
}
_BUDGET_S = 0.2
_MOST_TIMES = 24


def kind_of(folder: Path) -> str:
    """`model` or a head's kind, by the names of the weights: configurations of public heads do not tell."""
    names = read_weights(weight_files(folder))
    prefix = layout_of(names)
    if prefix is not None and all(name.startswith(prefix) for name in names):
        return MTP  # and not a whole model that has such a layer as well
    return next((kind for sign, kind in _SIGNS.items() if sign in names), MODEL)


def predicts(folder: Path) -> bool:
    """Whether there is a layer in it that predicts further tokens."""
    return layout_of(read_weights(weight_files(folder))) is not None


def load_head(kind: str, folder: Path, target: Target) -> Any:
    """Raises ModelError if the folder holds another kind, or a head of another model."""
    found = kind_of(folder) if kind != MTP else MTP
    if found != kind:
        raise ModelError(f"{folder} holds no draft head of the kind {kind} but one of the kind {found}.")
    return HEADS[kind].load(folder, target)


def _quickest(seconds: Callable[[], float]) -> float:
    """The least of a few measurements. A GPU is ten times slower at first, so it goes on while they get better."""
    best, since = math.inf, 0
    for _ in range(_MOST_TIMES):
        spent = seconds()
        since = 0 if spent < 0.9 * best else since + 1
        best = min(best, spent)
        if since == 2:
            break
    return best


def measure(provider: Provider, graph: Any, max_rows: int, width: int) -> StepCosts:
    """What one link of a chain costs, for 1 and 2 pairs a row, by rows. `width`: of a hidden state. Leaves no row."""
    started, counts = time.perf_counter(), [1]
    cells: dict[Cell, float] = {}
    while counts[-1] < max_rows:
        counts.append(min(2 * counts[-1], max_rows))
    for rows in counts:
        for pairs in (1, 2):
            cells[rows, pairs] = _quickest(partial(provider.link_s, graph, rows, pairs, width))
        if time.perf_counter() - started > _BUDGET_S:
            break
    return StepCosts.from_cells(cells)
