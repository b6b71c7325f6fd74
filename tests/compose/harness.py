"""Drives a Step without threads: the same requests under any combination of axes, in any order of arrival."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from mantou.cache.none import NoCheckpoints, NoStore
from mantou.data import Request, Sampling, TokenEvent
from mantou.engine.axes import Axes
from mantou.engine.none import NoAdapters, NoConstraints
from mantou.engine.scheduler import FairScheduler
from mantou.engine.shapes import Shapes
from mantou.engine.step import Step
from mantou.kv import pages
from mantou.kv.codecs import Affine, Native, make_scheme
from mantou.kv.codecs.schemes import Delayed, PerLayer, Turbo
from mantou.kv.plan import KVPlan
from mantou.kv.shapes import LayerShape
from mantou.models.families import Family
from mantou.models.load import LoadedModel, describe
from mantou.models.runner import RING_SLACK, Runner
from mantou.protocols import CacheKey, KVCodec
from mantou.sampling.sampler import DeviceSampler
from mantou.spec.none import NoDraft

from .families import EQUAL_LENGTHS, EQUAL_WIDTHS, FAMILIES, MASK_AXES, tiny

VOCAB = 97
pages.MIN_SPARED = 16  # so that short rows part as long ones do


def capabilities(name: str) -> Family:
    """What the family is known to take, before any test has confirmed it."""
    return Family(
        name,
        supported=True,
        ragged_offsets=name not in EQUAL_LENGTHS,
        ragged_widths=name not in EQUAL_LENGTHS and name not in EQUAL_WIDTHS,
        mask_axes=MASK_AXES.get(name, 4),
    )


@cache
def model(family: str, seed: int = 0) -> LoadedModel:
    return describe(tiny(family, seed), FAMILIES[family], capabilities(family))


def own_model(family: str) -> LoadedModel:
    """Another graph with the weights of `model`, for a runner beside that of a Step: a graph serves the newest one."""
    return describe(tiny(family, 0), FAMILIES[family], capabilities(family))


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. The defaults are the plain single-row run that every other cell must equal."""

    family: str = "llama"
    rows: int = 1
    chunk: int = 512
    codec: str = "off"
    bucketed: bool = False
    provider: Any = field(default_factory=NoDraft)
    store: Any = field(default_factory=NoStore)
    checkpoints: Any = field(default_factory=NoCheckpoints)
    adapters: Any = field(default_factory=NoAdapters)
    constraints: Any = field(default_factory=NoConstraints)
    scheduler: Any = None
    seed: int = 0
    ring_slack: int = RING_SLACK
    pipelined: bool = True
    fill: bool = False
    taps: tuple[int, ...] = ()
    sampler: Any = field(default_factory=DeviceSampler)
    block: int | None = None  # of paged keys and values; None = a buffer a row
    compiles: bool = False


class Mixed:
    """Every layer another codec, as a kv_config.json may ask for."""

    name = "mixed"

    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        layers = sorted({shape.layer for shape in shapes if shape.has_columns})
        codecs: list[KVCodec] = [Affine(8, 32), Native(), Affine(4)]
        return PerLayer({layer: codecs[i % 3] for i, layer in enumerate(layers)}).plan(shapes)


def scheme(codec: str) -> Any:
    """A name of --kv-quant, perhaps with @N: from N tokens on. The rotations take the tiny models' head dimensions."""
    if codec == "mixed":
        return Mixed()
    name, _, start = codec.partition("@")
    bits = {"turbo": (8, 3), "turbo-k4v2": (4, 2)}.get(name)
    if bits is None:
        return make_scheme(name, start=int(start or 0))
    turbo = Turbo(*bits, head_dims=(32, 64, 128))
    return Delayed(turbo, int(start)) if start else turbo


def make_step(case: Case) -> Step:
    loaded = model(case.family, case.seed)
    shapes = Shapes(case.bucketed)
    runner = Runner(
        loaded,
        scheme(case.codec),
        max_width=case.chunk,
        span_step=shapes.span_step,
        ring_slack=case.ring_slack,
        block=case.block,
        compiles=case.compiles,
    )
    if case.taps:
        runner.tap(case.taps)
    axes = Axes(
        scheduler=case.scheduler or FairScheduler(case.rows),
        sampler=case.sampler,
        provider=case.provider,
        constraints=case.constraints,
        store=case.store,
        adapters=case.adapters,
        checkpoints=case.checkpoints,
        cache_key=lambda adapters: CacheKey(case.family, adapters, case.codec, "none"),
    )
    return Step(runner, axes, shapes, context_length=4096, pipelined=case.pipelined, fill=case.fill)


def prompts(vocab: int = VOCAB, lengths: Sequence[int] = (5, 41, 17, 70, 9, 1)) -> list[tuple[int, ...]]:
    dice = random.Random(1)
    return [tuple(dice.randrange(vocab) for _ in range(n)) for n in lengths]


def requests(sampling: Sampling | Sequence[Sampling], num_tokens: int = 24, **changes: Any) -> list[Request]:
    wishes = [sampling] * 6 if isinstance(sampling, Sampling) else list(sampling)
    return [
        replace(Request(f"r{i}", prompt, replace(wish, seed=11 + i), max_tokens=num_tokens - i), **changes)
        for i, (prompt, wish) in enumerate(zip(prompts(), wishes, strict=False))
    ]


@dataclass
class Outcome:
    tokens: dict[str, list[int]]
    events: list[TokenEvent]
    step: Step

    def finish(self, request_id: str) -> str | None:
        return next(e.finish for e in self.events if e.request_id == request_id and e.finish)


def run(
    case: Case,
    wanted: Sequence[Request],
    arrivals: Mapping[str, int] | None = None,
    cancel: Mapping[str, int] | None = None,
) -> Outcome:
    """Runs requests to the end. `arrivals`: id -> step at which it arrives; `cancel`: id -> step at which it goes."""
    step = make_step(case)
    arrivals, cancel = dict(arrivals or {}), dict(cancel or {})
    events: list[TokenEvent] = []
    tick, left = 0, list(wanted)
    woken = threading.Event()
    step.wake = woken.set
    while left or step.waiting or step.busy:
        for request in [r for r in left if arrivals.get(r.id, 0) <= tick]:
            step.submit(request)
            left.remove(request)
        for request_id in [i for i, at in cancel.items() if at == tick]:
            step.cancel(request_id)
        if step.waiting and not (left or step.busy):  # what is left waits for a slow tier
            assert woken.wait(30), "nothing came from the slow tier"
        woken.clear()
        step.advance()
        events += step.take_events()
        tick += 1
        assert tick < 5000, "the engine makes no progress"
    step.land()
    events += step.take_events()
    step.check_integrity()
    tokens: dict[str, list[int]] = {r.id: [] for r in wanted}
    for event in events:
        tokens[event.request_id] += event.tokens
    return Outcome(tokens, events, step)
