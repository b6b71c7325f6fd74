"""HTTP exchanges of agents: written down while they happen, made fit to be kept, read again. Knows no model."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mantou.api.anthropic.signature import recall

FOLDER = Path(__file__).parent / "recorded"
GENERATION = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
# Headers that say where and as whom a client called.
_PRIVATE = ("authorization", "x-api-key", "host", "content-length", "connection", "cookie")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HASH = re.compile(r"\b[0-9a-f]{32,64}\b")
_WORD = re.compile(r"[A-Za-z]{4,}")
_WORDS = ("text", "words", "filler", "content", "sentence", "paragraph", "dictionary")  # of 4 to 10 letters
_TOLD = re.compile(
    r"x-anthropic-billing-header:.*|.*working directory:.*|<[^>\n]+>"
)  # what the server or script reads


@dataclass(frozen=True, slots=True)
class Exchange:
    """`body`: the request's, JSON or None. `answer`: the response's text; not kept."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    status: int = 0
    answer: str = ""

    @property
    def generates(self) -> bool:
        return self.method == "POST" and self.path.partition("?")[0] in GENERATION

    @property
    def offers_tools(self) -> bool:
        return self.generates and bool(self.body.get("tools"))


class Recorder:
    """An ASGI app around another one that appends every exchange to a file, one JSON line each, once it is over."""

    def __init__(self, app: ASGIApp, file: Path) -> None:
        self._app, self._file = app, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent, answered = list[bytes](), list[bytes]()
        status = 0

        async def heard() -> Message:
            message = await receive()
            sent.append(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answered.append(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, heard, said)
        finally:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            query = scope["query_string"].decode()
            exchange = Exchange(
                scope["method"],
                scope["path"] + (f"?{query}" if query else ""),
                headers,
                json.loads(b"".join(sent) or b"null"),
                status,
                b"".join(answered).decode(),
            )
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(exchange)) + "\n")


def read(file: Path) -> list[Exchange]:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        return [Exchange(**json.loads(line)) for line in lines]


def keep(file: Path, exchanges: Sequence[Exchange], paths: Mapping[str, str], *, prose: bool) -> None:
    """Writes what may be kept. `paths`: places on this machine -> what stands for them.

    prose: keep the agent's own texts; else other words of about the same length take their place.
    """
    text = json.dumps([asdict(exchange) for exchange in exchanges])
    for place in sorted(paths, key=len, reverse=True):
        text = text.replace(place, paths[place])
    kept = [_trimmed(Exchange(**exchange), prose) for exchange in json.loads(text)]
    lines = "\n".join(json.dumps(asdict(exchange), sort_keys=True) for exchange in kept)
    for pattern, form in ((_UUID, "00000000-0000-4000-8000-{:012x}"), (_HASH, "{:032x}")):
        found = dict.fromkeys(pattern.findall(lines))
        for number, name in enumerate(found):
            lines = lines.replace(name, form.format(number))
    file.parent.mkdir(exist_ok=True)
    with gzip.GzipFile(file, "wb", mtime=0) as packed:
        packed.write(lines.encode())


def _trimmed(exchange: Exchange, prose: bool) -> Exchange:
    headers = {name: value for name, value in exchange.headers.items() if name not in _PRIVATE}
    body = exchange.body if prose else _without_prose(exchange.body)
    return Exchange(exchange.method, exchange.path, headers, body, exchange.status)


def _without_prose(value: Any, *, own: bool = False) -> Any:
    """`own`: inside what the agent itself tells the model: system prompts, reminders, descriptions."""
    match value:
        case str():
            return _other_words(value) if own or value.startswith("<system-reminder>") else value
        case list():
            return [_without_prose(one, own=own) for one in value]
        case {"role": "system"}:
            return {**value, "content": _without_prose(value["content"], own=True)}
        case {"type": "text", "text": text}:
            return {**value, "text": _without_prose(text, own=own)}
        case dict():
            return {
                key: _without_prose(
                    one, own=key == "system" or (key == "description" and isinstance(one, str))
                )
                for key, one in value.items()
            }
        case _:
            return value


def _other_words(text: str) -> str:
    def word(found: re.Match[str]) -> str:
        other = _WORDS[min(len(found[0]) - 4, len(_WORDS) - 1)]
        return other.title() if found[0][0].isupper() else other

    parts: list[str] = []
    done = 0
    for told in _TOLD.finditer(text):
        parts += [_WORD.sub(word, text[done : told.start()]), told[0]]
        done = told.end()
    return "".join((*parts, _WORD.sub(word, text[done:])))


# ------------------------------------------------------------------ answers
@dataclass(frozen=True, slots=True)
class Outcome:
    """What an answer said, whatever the dialect. `cached` of `prompt` tokens were not computed."""

    prompt: int
    cached: int
    text: str
    reasoning: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    finish: str


def cache_misses(turns: Sequence[Outcome]) -> list[str]:
    """What each turn after the first computed again although an earlier one had.

    While tools are called, a prompt goes on from the one before. Once the user speaks again, templates leave out the
    reasoning of the turns so far: then the first prompt is what can be shared for certain.
    """
    found: list[str] = []
    for before, turn in pairwise(turns):
        known = before.prompt if before.calls else turns[0].prompt
        if turn.cached < 0.95 * known:
            found.append(f"only {turn.cached} of the {known} tokens that were known came from the cache")
    return found


def outcome(exchange: Exchange) -> Outcome:
    """Raises AssertionError for a stream that does not end as its dialect says."""
    events = _events(exchange.answer)
    match exchange.path.partition("?")[0]:
        case "/v1/chat/completions":
            return _chat(events, exchange.answer)
        case "/v1/messages":
            return _messages(events)
        case _:
            return _responses(events)


def _events(answer: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    if not data:
        return [json.loads(answer)]
    return [json.loads(one) for one in data if one != "[DONE]"]


def _chat(events: list[dict[str, Any]], answer: str) -> Outcome:
    assert answer.endswith("data: [DONE]\n\n"), f"no [DONE] ends the stream: {answer[-500:]}"
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        function = call["function"]
        calls.setdefault(call["index"], [function.get("name", ""), ""])[1] += function["arguments"]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return Outcome(
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        tuple((name, json.loads(arguments)) for name, arguments in calls.values()),
        next(choice["finish_reason"] for choice in reversed(choices) if choice["finish_reason"]),
    )


def _messages(events: list[dict[str, Any]]) -> Outcome:
    if len(events) == 1:
        (body,) = events
        blocks, usage, finish = body["content"], body["usage"], body["stop_reason"]
    else:
        assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
        blocks = [dict(event["content_block"]) for event in events if event["type"] == "content_block_start"]
        for event in (event for event in events if event["type"] == "content_block_delta"):
            delta = event["delta"]
            kind = next(key for key in delta if key != "type")
            name = {"partial_json": "json"}.get(kind, kind)
            block = blocks[event["index"]]
            block[name] = block.get(name, "") + delta[kind]
        for block in blocks:
            block["input"] = json.loads(block.pop("json", "") or "{}")
        usage, finish = events[-2]["usage"], events[-2]["delta"]["stop_reason"]
    cached = usage["cache_read_input_tokens"]
    return Outcome(
        cached + usage["input_tokens"] + usage["cache_creation_input_tokens"],
        cached,
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(
            recall(block["thinking"], block["signature"], "the answer")  # for some, only the signature has it
            for block in blocks
            if block["type"] == "thinking"
        ),
        tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
        finish,
    )


def _responses(events: list[dict[str, Any]]) -> Outcome:
    last = events[-1]
    assert last["type"] == "response.completed", last
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    body = last["response"]
    items = body["output"]
    return Outcome(
        body["usage"]["input_tokens"],
        body["usage"]["input_tokens_details"]["cached_tokens"],
        "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]),
        tuple(
            (item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"
        ),
        body["status"],
    )
