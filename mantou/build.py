"""The composition root: Config -> running engine and server. The only module that names implementations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantou import __version__
from mantou.build_facts import (
    choose_paging,
    default_rows,
    describe,
    describe_paging,
    limit_context,
    model_id,
)
from mantou.config import Config
from mantou.data import ModelInfo
from mantou.errors import ConfigError, MantouError, ModelError
from mantou.progress import ProgressBoard
from mantou.protocols import CacheKey, CheckpointStore, Constraints, Mailbox, PrefixStore

if TYPE_CHECKING:
    from mantou.api.embeddings.service import EmbeddingService
    from mantou.api.service import Service
    from mantou.build_embeddings import EmbeddingSide
    from mantou.chat.grammar.grammars import Grammars
    from mantou.chat.template import ChatTemplate
    from mantou.chat.tokenizer import Tokenizer
    from mantou.engine.calls import CallEngine
    from mantou.engine.engine import Engine
    from mantou.engine.step import Step
    from mantou.kv.budget import KVBudget
    from mantou.models.runner import Runner


@dataclass(slots=True)
class Assembly:
    """What one model needs to answer, as it becomes known: text side first, then the loaded graph."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    template: ChatTemplate
    generation_config: Mapping[str, Any]
    grammars: Grammars
    info: ModelInfo | None = None
    store: PrefixStore | None = None
    checkpoints: CheckpointStore | None = None
    embedding: EmbeddingSide | None = None  # the embedding model, if one is served
    embeddings: EmbeddingService | None = None  # and once it is loaded


def obtain_folder(config: Config, board: ProgressBoard) -> Path:
    from mantou.models.hub import obtain

    return obtain(config.model, revision=config.revision, cache_dir=config.cache_dir, board=board)


def assemble(folder: Path, config: Config) -> Assembly:
    """The text side of a model folder. Needs no MLX, so any thread may call it while the weights load."""
    from mantou.chat.grammar.grammars import Grammars
    from mantou.chat.template import ChatTemplate
    from mantou.chat.tokenizer import Tokenizer
    from mantou.models.checkpoint import generation_config

    tokenizer = Tokenizer.load(folder)
    return Assembly(
        folder,
        config,
        tokenizer,
        ChatTemplate.load(folder, tokenizer, config.tool_parser),
        generation_config(folder),
        Grammars(tokenizer),
    )


def make_engine(
    assembly: Assembly,
    mailbox: Mailbox,
    board: ProgressBoard,
    *,
    on_ready: Callable[[ModelInfo], None] = lambda info: None,
    on_failed: Callable[[MantouError], None] = lambda error: None,
) -> Engine | CallEngine:
    """An engine that loads the assembly's weights on its own thread once it is started."""
    from mantou.models.ops.openblas import preload_openblas

    preload_openblas()  # before anything below imports MLX
    from mantou.build_embeddings import embedding_engine
    from mantou.engine.engine import Engine
    from mantou.models.device import release_thread

    side = assembly.embedding
    if side is not None and side.only:
        return embedding_engine(assembly, side, on_ready=on_ready, on_failed=on_failed)

    def load() -> Step:
        with board.task(model_id(assembly.folder, assembly.config)) as task:
            task.stage("load")
            try:
                if side is not None:
                    side.load()
                step, info = load_step(
                    assembly.folder, assembly.config, assembly.template, board, assembly.grammars
                )
            except BaseException:
                release_thread()
                raise
        assembly.info, assembly.store, assembly.checkpoints = info, step.axes.store, step.axes.checkpoints
        assembly.template.finds_boundaries = "recurrent" in info.num_layers and step.axes.store.wants
        return step

    def ready() -> None:
        assert assembly.info is not None
        if side is not None:
            assembly.embeddings = side.service(engine)
            assembly.info = side.shown_beside(assembly.info)
        on_ready(assembly.info)

    engine = Engine(
        load, mailbox, max_waiting=assembly.config.max_waiting, on_ready=ready, on_failed=on_failed
    )
    return engine


def load_step(
    folder: Path,
    config: Config,
    template: ChatTemplate | None = None,
    board: ProgressBoard | None = None,
    constraints: Constraints | None = None,
) -> tuple[Step, ModelInfo]:
    """Loads a model on the calling thread and puts the step together. Raises MantouError."""
    from mantou.build_drafts import make_drafting, make_sampler
    from mantou.engine.axes import Axes
    from mantou.engine.none import NoAdapters, NoConstraints
    from mantou.engine.scheduler import FairScheduler
    from mantou.engine.shapes import Shapes
    from mantou.engine.step import Step
    from mantou.kv.blocks import PAGEABLE
    from mantou.kv.codecs import InRecords, make_scheme
    from mantou.models.checkpoint import fingerprint
    from mantou.models.device import this_device
    from mantou.models.load import load
    from mantou.models.ops import device_ops
    from mantou.models.runner import Runner

    scheme = make_scheme(
        config.kv_quant, folder, group_size=config.kv_group_size, start=config.kv_quant_start
    )
    device = this_device()
    loaded = load(folder, dtype=config.dtype)
    ops = device_ops(device.kind, threads=config.threads, activations=config.cpu_activations)
    block, why = choose_paging(config, ops.reads_blocks)
    scheme = InRecords(
        scheme, ops.records, fetched=PAGEABLE if block else ()
    )  # kernels know no blocks of records
    plan = scheme.plan(loaded.shapes)
    op_notes = ops.install(loaded.module)
    notes = (*loaded.notes, *op_notes, *(template.notes if template else ()))
    token_bytes = plan.token_bytes()
    rows = config.batch or default_rows(loaded, token_bytes, device.kind, device.memory_bytes)
    shapes = Shapes(bucketed=not device.on_cpu)
    runner = Runner(
        loaded,
        scheme,
        max_width=config.prefill_chunk,
        span_step=shapes.span_step,
        write_rows=ops.write_rows,
        read_blocks=ops.read_blocks if ops.reads_blocks else None,
        block=block,
        compiles=ops.compiles,
    )
    info = describe(folder, config, loaded, plan.name, device.name, notes, template)
    info = replace(
        info,
        extra={
            "rows": rows,
            "kv_bytes_per_token": token_bytes,
            "memory_bytes": device.memory_bytes,
            "kv_codecs": dict(plan.counts),
            "kv_paging": describe_paging(info.num_layers, runner.block, why),
        },
    )
    budget = make_budget(config, runner, shapes.slots)
    limit_context(info, budget)  # what can hold no row is told before a draft model is fetched
    info = replace(info, notes=(*info.notes, *runner.warm_up()))
    # Everything that changes the numbers a prompt leaves in the KV, so that a store never serves another model's.
    numbers = (
        f"{fingerprint(folder)} {loaded.dtype} {device.kind} {'; '.join(op_notes)} {config.cpu_activations}"
    )
    sampler = make_sampler(config, ops)
    store, checkpoints = make_stores(config, recurrent=runner.recurrent)
    try:
        drafting = make_drafting(config, folder, runner, info, f"{numbers} {plan.key}", store, sampler, board)
        budget = replace(
            make_budget(config, runner, shapes.slots, drafting.weights_bytes), beside=drafting.kept
        )
        info = limit_context(info, budget)
    except BaseException:
        store.close()
        checkpoints.close()
        raise
    extra = {
        "drafts": drafting.note,
        "draft_kinds": drafting.kinds,
        "draft_weights_bytes": drafting.weights_bytes,
        "draft_kv_bytes_per_token": drafting.kept.token_bytes if drafting.kept else 0.0,
        "fill": config.fill,
    }
    info = replace(info, extra={**info.extra, **extra})
    axes = Axes(
        scheduler=FairScheduler(rows, budget.fits),
        sampler=sampler,
        provider=drafting.provider,
        constraints=constraints or NoConstraints(),
        store=store,
        adapters=NoAdapters(),
        cache_key=lambda adapters: CacheKey(f"{info.id} {numbers}", adapters, plan.key, "none"),
        checkpoints=checkpoints,
    )
    step = Step(
        runner,
        axes,
        shapes,
        context_length=info.context_length,
        pipelined=not device.on_cpu,
        fill=config.fill is not None,
    )
    return step, info


def make_budget(
    config: Config, runner: Runner, slots: Callable[[int], int], draft_bytes: int = 0
) -> KVBudget:
    """What rows may take together. Raises ConfigError if the memory budget leaves nothing for them."""
    from mantou.kv.budget import KVBudget, kv_limit
    from mantou.models.device import limit_memory

    limit = kv_limit(
        config.kv_budget_bytes,
        config.memory_budget_bytes,
        weights_bytes=runner.model.weights_bytes,
        chunk=config.prefill_chunk,
        draft_bytes=draft_bytes,
    )
    if config.memory_budget_bytes is not None:
        limit_memory(config.memory_budget_bytes)
    return KVBudget(runner.plan, limit, slots, runner.ring_slack, runner.block)


def check(config: Config) -> None:
    """Raises ConfigError for settings that contradict each other, before anything slow begins."""
    from mantou.api.guard import check_bind
    from mantou.spec.setup import check as check_drafting

    check_drafting(config)
    check_bind(config)
    if config.tool_parser is not None:
        from mantou.chat.tools import check_name

        check_name(config.tool_parser)
    if config.generation_checkpoint and config.ssd_cache_dir is None:
        raise ConfigError(
            "--generation-checkpoint keeps answers in progress in the folder of --ssd-cache; give one, or leave it out."
        )


def make_stores(config: Config, *, recurrent: bool) -> tuple[PrefixStore, CheckpointStore]:
    """Where prompts and answers in progress are kept. Raises ConfigError if the folder cannot be used."""
    from mantou.cache.checkpoints import SsdCheckpoints
    from mantou.cache.none import NoCheckpoints

    check(config)
    store = make_store(config, recurrent=recurrent)
    if config.ssd_cache_dir is None or not config.generation_checkpoint:
        return store, NoCheckpoints()
    try:
        return store, SsdCheckpoints(config.ssd_cache_dir, config.generation_checkpoint)
    except ConfigError:
        store.close()
        raise


def make_store(config: Config, *, recurrent: bool) -> PrefixStore:
    """The tiers that the flags ask for. Raises ConfigError if the folder cannot be used."""
    from mantou.cache.none import NoStore
    from mantou.cache.ram import RamStore
    from mantou.cache.ssd import SsdStore
    from mantou.cache.tiered import Tiered

    memory = RamStore(config.prompt_cache_bytes, recurrent=recurrent) if config.prompt_cache_bytes else None
    if config.ssd_cache_dir is None:
        return memory or NoStore()
    disk = SsdStore(config.ssd_cache_dir, config.ssd_cache_bytes, recurrent=recurrent)
    return Tiered(memory, disk) if memory else disk


def make_service(
    config: Config,
    board: ProgressBoard,
    *,
    on_ready: Callable[[ModelInfo], None] = lambda info: None,
    on_failed: Callable[[MantouError], None] = lambda error: None,
) -> Service:
    """The server's state. The model is fetched and loaded in the background once the HTTP layer has started."""
    from mantou.api.logs import log_request
    from mantou.api.responses.store import open_store
    from mantou.api.service import Loaded, Service
    from mantou.api.telemetry import from_environment
    from mantou.build_embeddings import add_embeddings
    from mantou.models.ops.openblas import preload_openblas

    preload_openblas()  # before anything imports MLX, which converting a model may do

    check(config)
    telemetry = from_environment(__version__, config)
    engines: list[Engine | CallEngine] = []

    def fail(service: Service, error: MantouError) -> None:
        service.failed(error)
        on_failed(error)

    def prepare(service: Service) -> None:
        try:
            assembly = assemble(obtain_folder(config, board), config)
            add_embeddings(assembly, board, model_id)
        except MantouError as error:
            fail(service, error)
            return
        except Exception as error:  # a thread has no caller: whatever went wrong must become a sentence here
            fail(service, ModelError(f"The model could not be prepared ({type(error).__name__}: {error})."))
            return

        def ready(info: ModelInfo) -> None:
            assert assembly.store is not None and assembly.checkpoints is not None
            loaded = Loaded(
                info=info,
                tokenizer=assembly.tokenizer,
                template=assembly.template,
                generation_config=assembly.generation_config,
                created=int(time.time()),
                library=lambda: library_rows(config, assembly.folder),
                store=assembly.store,
                checkpoints=assembly.checkpoints,
                grammars=assembly.grammars,
                embeddings=assembly.embeddings,
            )
            service.loaded(loaded, engine)
            on_ready(info)

        engine = make_engine(
            assembly, service.mailbox, board, on_ready=ready, on_failed=lambda error: fail(service, error)
        )
        engines.append(engine)
        engine.start()

    def start(service: Service) -> None:
        threading.Thread(target=prepare, args=(service,), name="mantou-prepare", daemon=True).start()

    def stop() -> None:
        for engine in engines:
            engine.close()
        if telemetry is not None:
            telemetry.close()

    observers = [log_request] if telemetry is None else [log_request, telemetry]
    return Service(
        config,
        board,
        version=__version__,
        responses=open_store(
            config.response_store, ttl_s=config.response_ttl_s, max_bytes=config.response_bytes
        ),
        on_start=start,
        on_stop=stop,
        observers=observers,
    )


def library_rows(config: Config, serving: Path) -> list[Mapping[str, Any]]:
    """Local models for GET /library."""
    from mantou.models.hub.library import local_library

    return list(local_library(config.cache_dir, serving=serving))
