"""POST /v1/responses/compact: a conversation as the user's messages and a summary, which the model writes.

A local server has nobody to hide the summary from, so it is not encrypted: the item carries it with a digest, as
reasoning is carried. Knows no connection and no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mantou.api.anthropic.signature import sign
from mantou.api.fields import Schema
from mantou.api.responses.ask import ResponsesAsk, ask_schema, read_ask
from mantou.api.responses.items import new_id, read_input
from mantou.api.responses.wire import CompactedBody, MessageItem, ResponseBody
from mantou.errors import BadRequest

PATH = "/v1/responses/compact"
_FIELDS = (
    "input",
    "instructions",
    "previous_response_id",
    "model",
    "service_tier",
    "session_id",
    "prompt_cache_key",
)
_MOST_TOKENS = 1024  # of a summary: a small model may not end on its own
_WISH = (
    "Write a summary of our conversation so far, so that it can go on from the summary alone: what was asked for, what "
    "was done and found out, what was decided, and what is left to do, with the names, numbers and texts that matter. "
    "Answer with the summary only."
)


def read_compaction(body: Mapping[str, Any], headers: Mapping[str, str]) -> ResponsesAsk:
    """The conversation that is to be compacted. Raises BadRequest that names the first wrong field."""
    known = {name: body[name] for name in _FIELDS if name in body}
    silent = body.get("input") is None
    if silent and body.get("previous_response_id") is None:
        raise BadRequest(
            "input is missing; send the items of the conversation, or previous_response_id.", param="input"
        )
    own = {"input": _WISH} if silent else {}
    fixed = {
        "store": False,
        "truncation": "auto",
        "reasoning": {"effort": "none"},
        "temperature": 0,
        "max_output_tokens": _MOST_TOKENS,
    }
    ask = read_ask({**known, **own, **fixed}, headers)
    return replace(ask, items=()) if silent else ask


def summary_ask(conversation: ResponsesAsk) -> ResponsesAsk:
    """The request for the summary: the conversation, and the wish for one as the user's last message."""
    return replace(conversation, items=(*conversation.items, *read_input(_WISH, "input")))


def compacted(conversation: ResponsesAsk, answer: ResponseBody) -> CompactedBody:
    """All messages of the user, then the summary; `answer` is the response to `summary_ask`."""
    summary = "".join(
        part.text for item in answer.output if isinstance(item, MessageItem) for part in item.content
    )
    said = [item for item in conversation.items if item["type"] == "message" and item["role"] == "user"]
    item = {"type": "compaction", "id": new_id("cmp"), "encrypted_content": sign(summary, shown=False)}
    return CompactedBody(answer.id, answer.created_at, [*said, item], answer.usage)


def compaction_schema() -> Schema:
    """The body as a JSON schema."""
    known = ask_schema()["properties"]
    return {"type": "object", "properties": {name: known[name] for name in _FIELDS}}
