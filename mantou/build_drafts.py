"""The drafts' part of the composition root: from flags to a provider, a sampler that verifies, measured costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantou import __version__
from mantou.config import Config
from mantou.data import ModelInfo
from mantou.errors import ModelError
from mantou.progress import ProgressBoard
from mantou.protocols import CacheKey, DeviceOps, PrefixStore

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mantou.kv.budget import KVBudget
    from mantou.kv.plan import KVPlan
    from mantou.kv.shapes import LayerShape
    from mantou.models.runner import Runner
    from mantou.sampling.sampler import DeviceSampler
    from mantou.spec.cost import StepCosts
    from mantou.spec.setup import Drafting, LoadedDraft


def make_sampler(config: Config, ops: DeviceOps) -> DeviceSampler:
    """The one that draws and, with it, verifies drafts."""
    from mantou.sampling.rejection import RejectionSampler
    from mantou.sampling.sampler import DeviceSampler

    return (RejectionSampler if config.draft_verify == "rejection" else DeviceSampler)(ops.draw)


def make_drafting(
    config: Config,
    folder: Path,
    runner: Runner,
    info: ModelInfo,
    identity: str,
    store: PrefixStore,
    sampler: DeviceSampler,
    board: ProgressBoard | None,
) -> Drafting:
    """The draft provider of the flags. `identity`: everything that the time of a step depends on but the machine."""
    import mlx.core as mx

    from mantou.data import Sampling
    from mantou.models.device import this_device
    from mantou.models.hub import default_cache_dir
    from mantou.spec.calibrate import step_costs
    from mantou.spec.heads.kinds import MTP, predicts
    from mantou.spec.setup import make_drafting as make

    costs = (config.cache_dir or default_cache_dir()).parent / "step-costs"

    def draw(logits: mx.array) -> list[mx.array]:
        num_rows, width, _ = logits.shape
        wishes = sampler.prepare([Sampling(temperature=0.0)] * num_rows)
        return sampler.draw(logits, wishes, [range(width)] * num_rows).arrays()

    def measured(of: Runner, what: str) -> StepCosts:
        where = f"{this_device().name} {config.threads} {config.prefill_chunk} {__version__}"
        return step_costs(of, draw, int(info.extra["rows"]), identity=f"{what} {where}", folder=costs)

    def load_model(kind: str) -> LoadedDraft:
        return load_draft(kind, config, folder, runner, info, store, measured, board)

    def load_own() -> LoadedDraft | None:
        if not predicts(folder):
            return None
        try:
            loaded = load_head(MTP, config, folder, runner, info, store)
        except ModelError as error:
            if config.mtp or config.draft_kind is not None:
                raise
            log.warning("the model's prediction layer is not used: %s", error.message)
            return None
        return replace(loaded, note="the model's own prediction layer")

    pipelined = not this_device().on_cpu
    return make(config, lambda: measured(runner, identity), load_model, load_own, pipelined=pipelined)


def load_draft(
    kind: str,
    config: Config,
    folder: Path,
    target: Runner,
    info: ModelInfo,
    store: PrefixStore,
    measured: Callable[[Runner, str], StepCosts],
    board: ProgressBoard | None,
) -> LoadedDraft:
    """What --draft-model names: a model, or a head of one of the known kinds. Raises ModelError."""
    from mantou.models.hub import obtain
    from mantou.spec.heads.kinds import MODEL, kind_of
    from mantou.spec.setup import AUTO

    name = str(config.draft_model)
    place = obtain(name, revision=None, cache_dir=config.cache_dir, board=board or ProgressBoard())
    kind = kind_of(place) if kind == AUTO else kind
    if kind == MODEL:
        return load_draft_model(config, folder, place, target, info, store, measured)
    return load_head(kind, config, place, target, info, store)


def load_head(
    kind: str, config: Config, place: Path, target: Runner, info: ModelInfo, store: PrefixStore
) -> LoadedDraft:
    """A head on the target's hidden states as a provider. Raises ModelError if it is another model's."""
    from mlx.utils import tree_flatten

    from mantou.kv.budget import KVBudget
    from mantou.kv.codecs import make_scheme
    from mantou.models.checkpoint import fingerprint
    from mantou.models.device import this_device
    from mantou.models.load import DTYPES
    from mantou.models.ops import device_ops
    from mantou.spec.heads.kinds import HEADS, measure
    from mantou.spec.heads.kinds import load_head as load
    from mantou.spec.heads.parts import Target
    from mantou.spec.setup import LoadedDraft
    from mantou.spec.slots import slots_for

    device = this_device().kind
    ops = device_ops(device, threads=config.threads, activations=config.cpu_activations)
    vocabulary = target.vocabulary()
    kept: list[KVBudget] = []
    sizes: list[int] = []

    def plan(shapes: Sequence[LayerShape]) -> KVPlan:
        """A head asks for its one plan while it is loaded."""
        found = make_scheme("off", place).plan(shapes)
        kept.append(KVBudget(found, None, slots_for, slack=1))
        return found

    def install(module: Any) -> Sequence[str]:
        """A head hands over each of its modules once its weights are what they will be."""
        sizes.append(sum(array.nbytes for array in dict(tree_flatten(module.parameters())).values()))
        return ops.install(module)

    helped = Target(
        info.id,
        info.vocab_size,
        DTYPES[target.model.dtype],
        vocabulary,
        plan,
        install,
        len(target.model.module.layers),
        packs=vocabulary.packed if ops.packs is None else ops.packs,
        span_step=target.span_step,
        write_rows=ops.write_rows,
        shapes=target.model.shapes,
    )
    graph = load(kind, place, helped)
    if graph.taps:
        target.tap(graph.taps)
    numbers = f"{fingerprint(place)} {target.model.dtype} {device} {config.cpu_activations}"
    make = HEADS[kind].provider
    provider = make(
        graph,
        make_sampler(config, ops),
        store,
        CacheKey(f"draft {info.id} {numbers}", (), "off", "none"),
        measure(make, graph, int(info.extra["rows"]), helped.hidden_size * max(len(graph.taps), 1)),
        num_tokens=config.num_draft_tokens or 4,
    )
    return LoadedDraft(kind, provider, f"{kind} head {place.name}", next(iter(kept), None), sum(sizes))


def load_draft_model(
    config: Config,
    folder: Path,
    place: Path,
    target: Runner,
    info: ModelInfo,
    store: PrefixStore,
    measured: Callable[[Runner, str], StepCosts],
) -> LoadedDraft:
    """A model of its own as a provider. Raises ModelError for another vocabulary."""
    from mantou.chat.tokenizer import Tokenizer
    from mantou.kv.budget import KVBudget
    from mantou.kv.codecs import make_scheme
    from mantou.models.checkpoint import fingerprint
    from mantou.models.device import this_device
    from mantou.models.load import load
    from mantou.models.ops import device_ops
    from mantou.models.runner import Runner as DraftRunner
    from mantou.spec.heads.kinds import MODEL
    from mantou.spec.model import ModelDraft
    from mantou.spec.setup import LoadedDraft, vocabulary_fault
    from mantou.spec.slots import slots_for

    name = str(config.draft_model)
    fault = vocabulary_fault(Tokenizer.load(folder).vocabulary(), Tokenizer.load(place).vocabulary())
    if fault is not None:
        raise ModelError(
            f"--draft-model {name} has another vocabulary ({fault}); choose a small model of the same family."
        )
    kind = this_device().kind
    loaded = load(place, dtype=config.dtype)
    ops = device_ops(kind, threads=config.threads, activations=config.cpu_activations)
    notes = ops.install(loaded.module)
    runner = DraftRunner(
        loaded,
        make_scheme("off", place),
        max_width=config.prefill_chunk,
        span_step=target.span_step,
        write_rows=ops.write_rows,
        read_blocks=ops.read_blocks if ops.reads_blocks else None,
        block=target.block,
    )
    numbers = f"{fingerprint(place)} {loaded.dtype} {kind} {'; '.join(notes)} {config.cpu_activations}"
    provider = ModelDraft(
        runner,
        make_sampler(config, ops),
        store,
        CacheKey(f"draft {name} {numbers}", (), runner.plan.key, "none"),
        measured(runner, numbers),
        num_tokens=config.num_draft_tokens or 4,
        vocab_size=info.vocab_size,
    )
    kept = KVBudget(runner.plan, None, slots_for, runner.ring_slack, runner.block)
    return LoadedDraft(MODEL, provider, f"draft model {place.name}", kept, loaded.weights_bytes)
