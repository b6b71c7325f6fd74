"""What the HTTP layer needs of the rest of the server, filled in as it becomes ready. Knows no routes, no loading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from mantou.api.envelope import Exchange, Running
from mantou.api.mailbox import AsyncMailbox
from mantou.errors import MantouError, ModelUnavailable
from mantou.metrics import ServerMetrics

if TYPE_CHECKING:
    from mantou.api.embeddings.service import EmbeddingService
    from mantou.api.responses.store import ResponseStore
    from mantou.chat.grammar.grammars import Grammars
    from mantou.chat.template import ChatTemplate
    from mantou.chat.tokenizer import Tokenizer
    from mantou.config import Config
    from mantou.data import FinishReason, ModelInfo, Request
    from mantou.protocols import CheckpointStore, PrefixStore

T = TypeVar("T")


class Engine(Protocol):
    """The engine as the HTTP layer sees it. Every method may be called from any thread."""

    def submit(self, request: Request) -> None:
        """Queues one sequence. Raises QueueFull, EngineStopped or BadRequest; then no event will come."""
        ...

    def cancel(self, request_id: str, finish: FinishReason = "cancelled") -> None:
        """Ends a sequence between two steps; its last event still comes. Does nothing for an unknown id.

        "stop" says that the text is complete, so that nothing of it is kept for a repeat of the request.
        """
        ...

    def stats(self) -> Mapping[str, Any]: ...
    def call(self, fn: Callable[[], T]) -> Future[T]: ...


class Board(Protocol):
    """Progress of downloads, conversions and loads."""

    def snapshot(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can answer."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    generation_config: Mapping[str, Any]  # the checkpoint's generation_config.json; empty if it has none
    created: int  # Unix seconds
    library: Callable[[], Sequence[Mapping[str, Any]]]  # scans the disk: slow, so it is called off the loop
    store: PrefixStore
    checkpoints: CheckpointStore
    grammars: Grammars
    embeddings: EmbeddingService | None = None  # None = no embedding model is served


class Service:
    """The live state behind the routes.

    `attach` gives it the event loop; `loaded` and `failed` may then be called once, from any thread. `on_start` is
    called on the loop right after `attach` (start the model thread there, and return at once); `on_stop` is called in
    a worker thread when the server goes down, so it may block.
    """

    def __init__(
        self,
        config: Config,
        board: Board,
        *,
        version: str,
        responses: ResponseStore,
        on_start: Callable[[Service], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        heartbeat_s: float = 15.0,
        observers: Sequence[Callable[[Exchange], None]] = (),
    ) -> None:
        self.config = config
        self.board = board
        self.version = version
        self.responses = responses
        self.on_start = on_start
        self.on_stop = on_stop
        self.heartbeat_s = heartbeat_s
        self.observers = observers  # see every request once it is over
        self.running = Running()
        self.num_background: Callable[[], int] = lambda: 0  # answers in the making that no request waits for
        self.draining = False  # told to stop: what runs goes on, nothing new begins
        self.metrics = ServerMetrics()
        self.started_at = time.time()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: AsyncMailbox | None = None
        self._engine: Engine | None = None
        self._loaded: Loaded | None = None
        self._error: MantouError | None = None
        self._settled = asyncio.Event()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the app when its loop runs, before the first request."""
        self._loop = loop
        self._mailbox = AsyncMailbox(loop)

    @property
    def mailbox(self) -> AsyncMailbox:
        if self._mailbox is None:
            raise RuntimeError("the service has no event loop yet: call attach first")
        return self._mailbox

    @property
    def engine(self) -> Engine:
        """The running engine. Raises ModelUnavailable before `loaded`."""
        if self._engine is None:
            raise ModelUnavailable(
                "The model is still loading; try again when GET /stats says that it is ready."
            )
        return self._engine

    @property
    def state(self) -> Literal["loading", "ready", "failed"]:
        if self._error is not None:
            return "failed"
        return "loading" if self._loaded is None else "ready"

    @property
    def model(self) -> Loaded | None:
        """The loaded model, or None while there is none; does not wait."""
        return self._loaded

    async def ready(self) -> Loaded:
        """Waits while the model loads. Raises ModelUnavailable with the reason if it could not be loaded."""
        await self._settled.wait()
        if self._loaded is None:
            reason = "it was not loaded" if self._error is None else self._error.message
            raise ModelUnavailable(f"No model is loaded: {reason}")
        return self._loaded

    def loaded(self, loaded: Loaded, engine: Engine) -> None:
        """The model can answer from now on. Callable from any thread."""

        def settle() -> None:
            self._engine, self._loaded = engine, loaded
            self._settled.set()

        self._on_loop(settle)

    def failed(self, error: MantouError) -> None:
        """The model could not be loaded; every waiting and later request gets the reason. Callable from any thread."""

        def settle() -> None:
            self._error = error
            self._settled.set()

        self._on_loop(settle)

    def _on_loop(self, settle: Callable[[], None]) -> None:
        if self._loop is None:
            raise RuntimeError("the service has no event loop yet: call attach first")
        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            if not self._loop.is_closed():  # a server that went down while it loaded has nobody left to tell
                raise
