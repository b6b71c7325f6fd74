"""Ollama's answers as lines of JSON, and its errors. Knows no engine and no fields of requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from mantou.api.envelope import current
from mantou.api.generation import Answer
from mantou.data import TextEvent, ToolCall, ToolDelta, Usage
from mantou.errors import MantouError

LINES = b"application/x-ndjson"
Style = Literal["chat", "generate"]


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """What lines of both routes share. The last one has the counts; durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    message: OllamaMessage


class OllamaGenerateLine(OllamaLine, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaError(msgspec.Struct):
    error: str


def body(
    style: Style, model: str, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = (), **more: Any
) -> bytes:
    """One answer or a part of one, as the route words it. `more`: what the end has to say."""
    head: dict[str, Any] = {"model": model, "created_at": now(), "done": False, **more}
    if style == "generate":
        return msgspec.json.encode(OllamaGenerateLine(response=text, thinking=thinking or UNSET, **head))
    called = [_call_body(number, call) for number, call in enumerate(calls)]
    message = OllamaMessage("assistant", text, thinking or UNSET, called or UNSET)
    return msgspec.json.encode(OllamaChatLine(message=message, **head))


def line(*args: Any, **more: Any) -> bytes:
    """The same with the end of a line."""
    return body(*args, **more) + b"\n"


def _call_body(number: int, call: ToolCall) -> OllamaCall:
    return OllamaCall(call.id, OllamaFunction(number, call.name, msgspec.json.decode(call.arguments or "{}")))


class OllamaEnvelope:
    """Ollama's wording: `{"error": sentence}`, in a stream as its last line."""

    content_type = LINES

    def __init__(self, style: Style = "chat") -> None:
        self._style: Style = style

    @property
    def keep_alive(self) -> bytes:
        """A chunk that says nothing: clients parse every line, so none may be empty."""
        return line(self._style, "")

    def status(self, error: MantouError) -> int:
        return error.status

    def body(self, error: MantouError) -> bytes:
        return msgspec.json.encode(OllamaError(error.message))

    def event(self, error: MantouError) -> bytes:
        return self.body(error) + b"\n"


class _Calls:
    """Tool calls come in pieces here and whole in Ollama's API."""

    def __init__(self) -> None:
        self._open: list[ToolDelta] = []

    def feed(self, deltas: Sequence[ToolDelta]) -> list[ToolCall]:
        """The calls that a later one shows to be complete."""
        done: list[ToolCall] = []
        for delta in deltas:
            if self._open and delta.index != self._open[0].index:
                done += self.take()
            self._open.append(delta)
        return done

    def take(self) -> list[ToolCall]:
        if not self._open:
            return []
        first = self._open[0]
        call = ToolCall(first.id, first.name, "".join(delta.arguments for delta in self._open))
        self._open = []
        return [call]


def whole_calls(calls: Sequence[ToolCall]) -> tuple[list[ToolCall], str]:
    """The calls whose arguments are complete, and the text of one that the end of the answer cut off."""
    good: list[ToolCall] = []
    rest = ""
    for call in calls:
        try:
            complete = isinstance(msgspec.json.decode(call.arguments or "{}"), dict)
        except msgspec.DecodeError:
            complete = False
        if complete:
            good.append(call)
        else:
            rest += f"{call.name}({call.arguments}"
    return good, rest


_LOADED: dict[str, Any] = {"done": True, "done_reason": "load"}


class OllamaEncoder:
    """Writes the one answer of a body. `load`: nothing was asked, the caller only wants the model to be there.

    Durations are measured: of the request up to the plan (the model may have been loading), from there to the first
    token, from there to the end.
    """

    def __init__(self, model: str, style: Style, *, load: bool = False) -> None:
        self._model = model
        self._style: Style = style
        self._load = load
        self._calls = _Calls()
        self._exchange = current()
        self._planned_s = self._exchange.seconds

    def start(self, index: int) -> bytes:
        return b""

    def text(self, index: int, event: TextEvent) -> bytes:
        calls, rest = whole_calls(self._calls.feed(event.tools))
        text = event.text + rest
        if not (text or event.reasoning or calls):
            return b""
        return line(self._style, self._model, text, event.reasoning, calls)

    def finish(self, index: int, reason: str, usage: Usage | None) -> bytes:
        calls, rest = whole_calls(self._calls.take())
        last = b""
        if calls or rest:
            last = line(self._style, self._model, rest, "", calls)
        if usage is None:
            return last
        return last + line(self._style, self._model, **self._end(reason, usage))

    def done(self, usage: Usage) -> bytes:
        return line(self._style, self._model, **_LOADED) if self._load else b""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        if self._load:
            return body(self._style, self._model, **_LOADED)
        (answer,) = answers
        calls, rest = whole_calls(answer.calls())
        text, thinking = "".join(answer.text) + rest, "".join(answer.reasoning)
        end = self._end(answer.finish or "stop", usage)
        return body(self._style, self._model, text, thinking, calls, **end)

    def _end(self, reason: str, usage: Usage) -> dict[str, Any]:
        total_s = time.perf_counter() - self._exchange.arrived
        first_s = self._exchange.work.first_token_s
        first_s = total_s if first_s is None else first_s
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _ns(total_s),
            "load_duration": _ns(self._planned_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self._planned_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(total_s - first_s),
        }


def _ns(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
