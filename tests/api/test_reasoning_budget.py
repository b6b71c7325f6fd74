"""A budget of reasoning reaches the engine from every dialect, and usage says how much was spent."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.api.conftest import Running

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        (CHAT, {"thinking_budget": 16}, 16),
        (CHAT, {"thinking_token_budget": 17}, 17),
        (CHAT, {"reasoning": {"max_tokens": 0, "effort": "high"}, "thinking_budget": 3}, 0),
        (CHAT, {"thinking_budget": None, "reasoning": {"max_tokens": None}}, None),
        ("/v1/messages", {"max_tokens": 2048, "thinking": THINKING}, 1024),
        ("/v1/messages", {"max_tokens": 9, "thinking_budget": 4}, 4),
        ("/v1/responses", {"input": "Hi", "thinking_budget": 5}, 5),
        ("/api/chat", {"think": True, "stream": False, "thinking_budget": 6}, 6),
    ],
)
def test_every_dialect_has_a_budget(
    server: Running, http: httpx2.Client, path: str, fields: dict[str, Any], budget: int | None
) -> None:
    answer = http.post(path, json={"model": "m", "messages": MESSAGES, **fields})
    assert answer.status_code == 200, answer.text
    assert server.engine is not None
    asked = server.engine.requests[-1].reasoning_budget
    assert (asked and asked.num_tokens) == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"reasoning": {"max_tokens": 1.5}}, "reasoning.max_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": 3}, "reasoning"),
    ],
)
def test_a_budget_that_is_none_is_refused_by_name(
    http: httpx2.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post(CHAT, json={"messages": MESSAGES, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_chat_says_how_many_tokens_were_reasoning(server: Running, http: httpx2.Client) -> None:
    server.script.reply = lambda request: "Why?</think>So."
    ask = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}}
    usage = http.post(CHAT, json=ask).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Why?</think>")}
    server.script.reply = lambda request: "So."
    assert "completion_tokens_details" not in http.post(CHAT, json={"messages": MESSAGES}).json()["usage"]
