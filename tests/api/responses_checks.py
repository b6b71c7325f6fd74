"""What every response and every stream must hold, for the tests of /v1/responses."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_SCHEMA = json.loads((Path(__file__).parent / "schemas" / "open_responses.json").read_text("utf-8"))
_ENDS = ("response.completed", "response.incomplete", "response.failed")


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    """Of one definition: a union would say only that nothing fits."""
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": _SCHEMA["$defs"]})


@cache
def _events() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def check_response(body: dict[str, Any], *, open_responses: bool = True) -> dict[str, Any]:
    """Valid for the SDK's strict type and for Open Responses. Custom tools are OpenAI's alone."""
    Response.model_validate_json(json.dumps(body), strict=True)
    if open_responses:
        _validator("Response").validate(body)
    ids = [item["id"] for item in body["output"]]
    assert len(set(ids)) == len(ids)
    return body


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should; comments are left out."""
    blocks = [block for block in stream.decode().split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    found: list[dict[str, Any]] = []
    for block in blocks[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def check_stream(
    events: list[dict[str, Any]], *, open_responses: bool = True, first: int = 0, cancelled: bool = False
) -> dict[str, Any]:
    """Every event is valid, numbers rise by one, and the items that the deltas make are those of the last event.

    Returns the response of the last event.
    """
    for event in events:
        _events().validate_json(json.dumps(event), strict=True)
        if open_responses:
            _validator(f"Event:{event['type']}").validate(event)
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    if cancelled:
        assert events[-1]["type"] not in _ENDS
        return {}
    assert events[-1]["type"] in _ENDS
    assert not any(event["type"] in _ENDS for event in events[:-1])
    last = check_response(events[-1]["response"], open_responses=open_responses)
    if first == 0:
        assert events[0]["type"] == "response.created"
        assert events[0]["response"]["output"] == []
        _check_items(events, last)
    return last


def _check_items(events: list[dict[str, Any]], last: dict[str, Any]) -> None:
    """One item is open at a time; its deltas, its done event and its place in the last response say the same."""
    said: dict[int, str] = {}
    open_item: int | None = None
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert event["output_index"] == len(done)
            open_item, said[len(done)] = len(done), ""
            assert event["item"]["status"] == "in_progress"
        elif kind == "output_item.done":
            assert event["output_index"] == open_item
            done.append(event["item"])
            open_item = None
        elif "output_index" in event:
            assert event["output_index"] == open_item
            if kind.endswith(".delta"):
                said[event["output_index"]] += event["delta"]
            elif kind.endswith((".text.done", "_text.done", "arguments.done", "input.done")):
                whole = event.get("text", event.get("arguments", event.get("input")))
                assert whole == said[event["output_index"]]
    assert open_item is None
    assert done == last["output"]
    for index, item in enumerate(done):
        assert text_of(item) == said[index]


def text_of(item: dict[str, Any]) -> str:
    match item["type"]:
        case "message":
            return "".join(part["text"] for part in item["content"])
        case "reasoning":
            return "".join(part["text"] for part in item["summary"])
        case "function_call":
            return item["arguments"]
        case _:
            return item["input"]
