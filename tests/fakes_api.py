"""Fakes behind the HTTP layer: a scripted engine in its own thread and a byte-level model. No arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mantou.api.mailbox import AsyncMailbox
from mantou.chat.template import ChatTemplate
from mantou.chat.tokenizer import Tokenizer
from mantou.data import ModelInfo, Request, TokenEvent, TokenLogprobs, Usage
from mantou.errors import QueueFull

# Knows thinking and tools, so that both switches can be seen in the prompt.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
INFO = ModelInfo(
    id="fake/bytes-1B",
    model_type="fake",
    context_length=4096,
    vocab_size=258,
    weights_bytes=0,
    dtype="float32",
    device="none",
    kv_scheme="off",
    num_layers={"full": 2},
    reasoning=True,
)


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; id = rank of GPT-2's letter for it. Two special tokens follow."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: rank for rank, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


def chat_template(tokenizer: Tokenizer, source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokenizer)


def one_by_one(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [(token,) for token in tokens]


@dataclass
class Script:
    """What the engine says. Tests set the fields."""

    reply: Callable[[Request], str] = lambda request: "Hello, wörld! 👋 How are you?"
    cut: Callable[[Sequence[int]], list[tuple[int, ...]]] = one_by_one
    fail_after: int | None = None  # steps of a row before it fails
    hold_after: int | None = None  # steps of a row before it says nothing more until it is cancelled


class FakeEngine:
    """Runs every submitted row one burst a step, all rows of a step in one `put`."""

    def __init__(self, mailbox: AsyncMailbox, tokenizer: Tokenizer, max_waiting: int = 64) -> None:
        self.script = Script()
        self.max_waiting = max_waiting
        self.cancelled: set[str] = set()
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self._mailbox = mailbox
        self._tokenizer = tokenizer
        self._rows: dict[str, Iterator[TokenEvent]] = {}
        self._held: set[str] = set()
        self._stopped = self._paused = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        with self.changed:
            if len(self._rows) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests wait already; try again later.")
            self.requests.append(request)
            self._rows[request.id] = self._events(request)
            self.changed.notify_all()

    def cancel(self, request_id: str, finish: str = "cancelled") -> None:
        with self.changed:
            if self._rows.pop(request_id, None) is not None:
                self._held.discard(request_id)
                self.cancelled.add(request_id)
                self._mailbox.put([TokenEvent(request_id, finish=finish, usage=Usage(1, 0, 1, "batched"))])
            self.changed.notify_all()

    def stats(self) -> dict[str, Any]:
        kv = {"scheme": "off", "bytes": 1024, "capacity_tokens": 4096, "tokens": 1024}
        numbers = {"running": len(self._rows), "waiting": 0, "rows": 8, "steps": 7, "prompt_tokens": 30}
        return numbers | {"generation_tokens": 20, "cached_tokens": 10, "requests": {"stop": 1}, "kv": kv}

    def call(self, fn: Callable[[], Any]) -> Future[Any]:
        """Runs it at once: there is no model thread that owns anything."""
        done: Future[Any] = Future()
        done.set_result(fn())
        return done

    def wait_for(self, condition: Callable[[FakeEngine], bool], timeout: float = 10.0) -> None:
        """Returns when the condition holds; fails the test if it never does."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), timeout), "the engine never got there"

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def pause(self, paused: bool = True) -> None:
        """Paused, it takes requests and makes no step, like a prefill that does not end."""
        with self.changed:
            self._paused = paused
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped:
            with self.changed:
                self.changed.wait_for(self._has_work)
                events = [event for row in self._rows.values() if (event := next(row, None)) is not None]
                for event in events:
                    if event.finish is not None:
                        del self._rows[event.request_id]
                self._mailbox.put(events)
                self.changed.notify_all()

    def _has_work(self) -> bool:
        return self._stopped or (not self._paused and len(self._rows) > len(self._held))

    def _events(self, request: Request) -> Iterator[TokenEvent]:
        """Bursts of the reply, cut at max_tokens; then EOS, which is counted and not sent."""
        tokens = self._tokenizer.encode(self.script.reply(request), add_special_tokens=False)
        script = replace(self.script)  # as it is now; `reply` may set it for this row
        limit = request.max_tokens or len(tokens) + 1
        kept = tokens[:limit]
        for number, burst in enumerate(script.cut(kept)):
            if number == script.hold_after:
                self._held.add(request.id)
                return
            if number == script.fail_after:
                yield TokenEvent(request.id, finish="error", error="This row was told to fail.")
                return
            logprobs = tuple(map(self._logprobs(request), burst)) if request.sampling.logprobs else ()
            yield TokenEvent(request.id, burst, logprobs)
        stopped = len(tokens) < limit
        usage = Usage(len(request.prompt), len(kept) + stopped, 3, "batched")
        yield TokenEvent(request.id, finish="stop" if stopped else "length", usage=usage)

    @staticmethod
    def _logprobs(request: Request) -> Callable[[int], TokenLogprobs]:
        def of(token: int) -> TokenLogprobs:
            top = tuple(((token + step) % 256, -0.25 - step) for step in range(request.sampling.top_logprobs))
            return TokenLogprobs(token, -0.25, top)

        return of
