"""Every generation route knows a conversation by the same four names, and a new one has to."""

from __future__ import annotations

from typing import Any

import pytest

from mantou.api.app import DIALECTS

# A body that each path takes; a dialect without one here fails.
_MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": _MESSAGES},
    "/v1/responses": {"input": "x"},
    "/api/chat": {"model": "m", "messages": _MESSAGES},
    "/api/generate": {"model": "m", "prompt": "x"},
}
FIELDS = {"session_id": "a", "prompt_cache_key": "b"}
HEADERS = {"x-session-affinity": "c", "session_id": "d"}
# Fields and headers left out -> who names the session
PRECEDENCE = [((), "a"), (("session_id",), "b"), (tuple(FIELDS), "c"), ((*FIELDS, "x-session-affinity"), "d")]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
@pytest.mark.parametrize(("absent", "expected"), PRECEDENCE, ids=[name for _, name in PRECEDENCE])
def test_who_names_the_session(dialect: Any, absent: tuple[str, ...], expected: str) -> None:
    fields = {name: value for name, value in FIELDS.items() if name not in absent}
    headers = {name: value for name, value in HEADERS.items() if name not in absent or name == "session_id"}
    ask = dialect.parse({**BODIES[dialect.path], **fields}, headers)
    assert ask.generation.session == expected


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_request_without_one_has_no_session(dialect: Any) -> None:
    assert dialect.parse(BODIES[dialect.path], {}).generation.session is None
