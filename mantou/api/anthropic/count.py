"""POST /v1/messages/count_tokens: how long a prompt is, without answering it. Knows no engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mantou.api.anthropic.prompt import PROMPT_FIELDS, read_prompt, render
from mantou.api.anthropic.wire import TokenCountBody, encode
from mantou.api.body import parse_object, read_body
from mantou.api.faults import ClientGone
from mantou.api.fields import Schema, properties

if TYPE_CHECKING:
    from mantou.api.service import Service


class TokenCount:
    """The length in tokens of the prompt that /v1/messages would make of the same body."""

    path = "/v1/messages/count_tokens"

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = parse_object(await read_body(scope, receive))
        except ClientGone:
            return
        ask = read_prompt(body)
        loaded = await self._service.ready()
        # Clients count long conversations, and running streams must not notice.
        prompt = await asyncio.to_thread(render, ask, loaded, self._service.config)
        answer = Response(encode(TokenCountBody(len(prompt.tokens))), media_type="application/json")
        await answer(scope, receive, send)

    @staticmethod
    def schema() -> Schema:
        """The body as a JSON schema."""
        return {"type": "object", "required": ["messages"], "properties": properties(PROMPT_FIELDS)}
