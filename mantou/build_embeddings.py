"""Puts an embedding model together: beside a chat model on its model thread, or as the only model of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mantou.config import Config
from mantou.data import ModelInfo
from mantou.errors import ConfigError, EngineStopped
from mantou.progress import ProgressBoard

if TYPE_CHECKING:
    import numpy as np

    from mantou.api.embeddings.service import EmbeddingInfo, EmbeddingService
    from mantou.build import Assembly
    from mantou.chat.tokenizer import Tokenizer
    from mantou.data import TokenRow
    from mantou.engine.calls import CallEngine
    from mantou.errors import MantouError
    from mantou.models.embedder import Embedder

# Padded tokens of one batch while nothing is being generated. More gain nothing, and a new chat waits for its end.
_BATCH_TOKENS = {"cpu": 2048, "metal": 16384, "cuda": 32768}


class Thread(Protocol):
    """The engine whose thread owns the arrays."""

    def call(self, fn: Callable[[], Any]) -> Any: ...
    def stats(self) -> Mapping[str, Any]: ...


class EmbeddingSide:
    """An embedding model as it becomes ready: text first, then on the model thread `load`, at the end `release`."""

    def __init__(self, folder: Path, name: str, config: Config, board: ProgressBoard, *, only: bool) -> None:
        from mantou.chat.tokenizer import Tokenizer
        from mantou.models.embedder_recipe import read_recipe

        self.name = name
        self.only = only  # it is the server's only model
        self.tokenizer: Tokenizer = Tokenizer.load(folder)
        self.recipe = read_recipe(folder)  # whatever is wrong with it shows before any weights are read
        self._folder = folder
        self._config = config
        self._board = board
        self._embedder: Embedder | None = None

    # ------------------------------------------------------------------ the model thread
    def load(self) -> None:
        """Raises MantouError."""
        from mantou.models.device import this_device
        from mantou.models.embedder import load_embedder
        from mantou.models.ops import device_ops

        config = self._config
        with self._board.task(self.name) as task:
            task.stage("load")
            ops = device_ops(this_device().kind, threads=config.threads, activations=config.cpu_activations)
            self._embedder = load_embedder(self._folder, ops, dtype=config.dtype)

    def run(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        if self._embedder is None:
            raise EngineStopped("The server is shutting down; send the request to another one.")
        return list(self._embedder.run(rows))

    def release(self) -> None:
        """Frees the arrays on the thread that made them."""
        self._embedder = None

    # ------------------------------------------------------------------ once loaded
    def service(self, engine: Thread) -> EmbeddingService:
        from mantou.api.embeddings.service import EmbeddingService
        from mantou.chat.embedding_text import EmbeddingText
        from mantou.engine.embedding_queue import EmbeddingQueue
        from mantou.models.device import this_device

        config = self._config
        queue = EmbeddingQueue(
            engine,
            self.run,
            max_tokens=config.embedding_batch_tokens or _BATCH_TOKENS[this_device().kind],
            max_waiting=config.max_waiting,
            busy=lambda: bool(engine.stats()["running"]),
        )
        text = EmbeddingText(self.tokenizer, self.recipe)
        return EmbeddingService(self.info, text, queue, self.recipe)

    @property
    def info(self) -> EmbeddingInfo:
        from mantou.api.embeddings.service import EmbeddingInfo

        model, recipe = self._loaded, self.recipe
        return EmbeddingInfo(
            id=self.name,
            model_type=recipe.model_type,
            num_dims=model.num_dims,
            max_tokens=recipe.max_tokens,
            pooling="+".join(recipe.pooling) or "cross-encoder",
            normalized=recipe.normalize,
            dtype=model.dtype,
            weights_bytes=model.weights_bytes,
            notes=model.notes,
        )

    def model_info(self) -> ModelInfo:
        """The only model of a server: it has no KV and no rows."""
        from mantou.models.device import this_device

        model, device = self._loaded, this_device()
        return ModelInfo(
            id=self.name,
            model_type=self.recipe.model_type,
            context_length=self.recipe.max_tokens,
            vocab_size=model.vocab_size,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            device=device.name,
            kv_scheme="none",
            notes=model.notes,
            extra={
                "memory_bytes": device.memory_bytes,
                "embeds_only": True,
                "embeddings": describe(self.info),
            },
        )

    def shown_beside(self, info: ModelInfo) -> ModelInfo:
        """The chat model's info with this model in it."""
        return replace(info, extra={**info.extra, "embeddings": describe(self.info)})

    @property
    def _loaded(self) -> Embedder:
        assert self._embedder is not None, "asked before it was loaded"
        return self._embedder


def describe(info: EmbeddingInfo) -> str:
    """One line for the ready card."""
    what = f"{info.num_dims} numbers, {info.pooling} pooling" if info.num_dims else "cross-encoder"
    return f"{info.id} ({info.model_type}, {what}), texts up to {info.max_tokens} tokens"


def add_embeddings(assembly: Assembly, board: ProgressBoard, model_id: Callable[[Path, Config], str]) -> None:
    """Finds out whether the assembly's model embeds, or fetches the one beside it. Raises MantouError."""
    from mantou.models.embedder_recipe import is_embedding_folder
    from mantou.models.hub import obtain

    config = assembly.config
    if config.embeds or is_embedding_folder(assembly.folder):
        if config.embedding_model is not None:
            raise ConfigError(f"{config.model} is an embedding model itself; leave --embedding-model out.")
        name = model_id(assembly.folder, config)
        assembly.embedding = EmbeddingSide(assembly.folder, name, config, board, only=True)
    elif config.embedding_model is not None:
        folder = obtain(config.embedding_model, revision=None, cache_dir=config.cache_dir, board=board)
        name = model_id(folder, replace(config, model=config.embedding_model))
        assembly.embedding = EmbeddingSide(folder, name, config, board, only=False)


def embedding_engine(
    assembly: Assembly,
    side: EmbeddingSide,
    *,
    on_ready: Callable[[ModelInfo], None],
    on_failed: Callable[[MantouError], None],
) -> CallEngine:
    """The engine of a server that only embeds."""
    from mantou.cache.none import NoCheckpoints, NoStore
    from mantou.engine.calls import CallEngine
    from mantou.models.device import release_thread

    def ready() -> None:
        assembly.info, assembly.store, assembly.checkpoints = side.model_info(), NoStore(), NoCheckpoints()
        assembly.embeddings = side.service(engine)
        on_ready(assembly.info)

    def release() -> None:
        side.release()
        release_thread()

    engine = CallEngine(
        side.load,
        refusal=f"{side.name} is an embedding model and generates no text; use /v1/embeddings, /v1/rerank or "
        "/v1/score, or serve a chat model with --embedding-model.",
        release=release,
        on_ready=ready,
        on_failed=on_failed,
    )
    return engine
