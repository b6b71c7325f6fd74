"""The one place that makes the server under test: real uvicorn, real chat layer, an engine behind them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import openai
import pytest

from mantou.api.envelope import Exchange
from mantou.api.responses.store import open_store
from mantou.api.server import create_server
from mantou.api.service import Loaded, Service
from mantou.cache.none import NoCheckpoints, NoStore
from mantou.chat.grammar.grammars import Grammars
from mantou.config import Config
from mantou.progress import ProgressBoard
from tests.fakes_api import INFO, TEMPLATE, FakeEngine, Script, byte_tokenizer, chat_template


@dataclass
class Running:
    """A server on a free port. `engine` is None until `load` was called."""

    port: int
    service: Service
    template: str
    context_length: int
    generation_config: dict[str, Any]
    max_waiting: int
    library_calls: int = 0
    engine: FakeEngine | None = None
    wires: list[Wire] = field(default_factory=list)
    shut_down: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def script(self) -> Script:
        assert self.engine is not None
        return self.engine.script

    def load(self) -> None:
        """What a model thread does when the weights are there."""
        tokenizer = byte_tokenizer()
        self.engine = FakeEngine(self.service.mailbox, tokenizer, self.max_waiting)

        def library() -> list[dict[str, Any]]:
            self.library_calls += 1
            return [{"repo_id": INFO.id, "supported": True}, {"repo_id": "other/model", "supported": True}]

        loaded = Loaded(
            info=replace(INFO, context_length=self.context_length),
            tokenizer=tokenizer,
            template=chat_template(tokenizer, self.template),
            generation_config=self.generation_config,
            created=1_700_000_000,
            library=library,
            store=NoStore(),
            checkpoints=NoCheckpoints(),
            grammars=Grammars(tokenizer),
        )
        self.service.loaded(loaded, self.engine)

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.stop()

    def wire(self) -> Wire:
        self.wires.append(Wire(self.port))
        return self.wires[-1]

    def hang_up(self) -> None:
        """Closes every wire that a test left open."""
        for wire in self.wires:
            wire.hang_up()
        self.wires.clear()


class Wire:
    """A raw socket, to see the bytes and to hang up in the middle."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._port = port
        self.seen = b""

    def post(self, path: str, body: bytes) -> None:
        self.send(f"POST {path} HTTP/1.1", f"Content-Length: {len(body)}", body=body)

    def send(self, *head: str, body: bytes = b"") -> None:
        lines = [*head, f"Host: 127.0.0.1:{self._port}", "", ""]
        self._socket.sendall("\r\n".join(lines).encode() + body)

    def read_until(self, *marks: bytes) -> bytes:
        """Everything up to now, once all marks have come in it."""
        deadline = time.monotonic() + 10
        while not all(mark in self.seen for mark in marks):
            assert time.monotonic() < deadline, self.seen
            self.read()
        return self.seen

    def read(self) -> None:
        """The next bytes, whatever they are."""
        got = self._socket.recv(65536)
        assert got, f"the server hung up: {self.seen!r}"
        self.seen += got

    def hang_up(self) -> None:
        self._socket.close()


@contextmanager
def serve(
    *,
    load: bool = True,
    heartbeat_s: float = 15.0,
    template: str = TEMPLATE,
    context_length: int = INFO.context_length,
    generation_config: dict[str, Any] | None = None,
    max_waiting: int = 64,
    grace_s: int = 5,
    observers: Sequence[Callable[[Exchange], None]] = (),
    **config: Any,
) -> Iterator[Running]:
    """Runs a server in a thread until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    attached = threading.Event()
    settings = Config(port=port, **config)
    service = Service(
        settings,
        ProgressBoard(),
        version="0.0",
        responses=open_store(
            settings.response_store, ttl_s=settings.response_ttl_s, max_bytes=settings.response_bytes
        ),
        on_start=lambda _: attached.set(),
        heartbeat_s=heartbeat_s,
        observers=observers,
    )
    running = Running(port, service, template, context_length, generation_config or {}, max_waiting)
    service.on_stop = running.stop
    server = create_server(service, grace_s=grace_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn", daemon=True)
    thread.start()
    assert attached.wait(10), "the server did not start"

    def shut_down() -> None:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"

    running.shut_down = shut_down
    if load:
        running.load()
    try:
        yield running
    finally:
        running.hang_up()
        shut_down()


@pytest.fixture(scope="session")
def _shared() -> Iterator[Running]:
    with serve() as running:
        yield running


@pytest.fixture
def server(_shared: Running, _http: httpx2.Client) -> Iterator[Running]:
    """The shared server with a fresh script. A test may leave no row behind."""
    engine = _shared.engine
    assert engine is not None
    engine.script = Script()
    engine.cancelled.clear()
    engine.requests.clear()
    yield _shared
    _shared.hang_up()
    engine.pause(False)
    engine.wait_for(lambda fake: fake.num_rows == 0)
    _http.get("/health")  # what the loop does now, it does after everything above
    assert _shared.service.mailbox.num_open == 0


@pytest.fixture(scope="session")
def _client(_shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{_shared.url}/v1", api_key="unused", max_retries=0, timeout=10) as found:
        yield found


@pytest.fixture
def client(server: Running, _client: openai.OpenAI) -> openai.OpenAI:
    return _client


@pytest.fixture(scope="session")
def _http(_shared: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=_shared.url, timeout=10) as found:
        yield found


@pytest.fixture
def http(server: Running, _http: httpx2.Client) -> httpx2.Client:
    return _http


@pytest.fixture
def serving() -> Callable[..., Any]:
    """`with serving(...) as running`: a server of its own, for tests that need another configuration."""
    return serve
