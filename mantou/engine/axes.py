"""Everything that composes, in one value. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mantou.protocols import (
    Adapters,
    CacheKey,
    CheckpointStore,
    Constraints,
    DraftProvider,
    PrefixStore,
    Sampler,
    Scheduler,
)


@dataclass(frozen=True, slots=True)
class Axes:
    """`build.py` fills it; tests put fakes in. "Off" is a null object on each axis."""

    scheduler: Scheduler
    sampler: Sampler
    provider: DraftProvider
    constraints: Constraints
    store: PrefixStore
    adapters: Adapters
    cache_key: Callable[[tuple[str, ...]], CacheKey]
    checkpoints: CheckpointStore
