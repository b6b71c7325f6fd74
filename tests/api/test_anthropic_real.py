"""Anthropic's SDK against the real process with the starter model: real template, real engine, real prompt cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.real import Server, serving, starter_folder

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};"
RULES = "You are a helpful assistant. " + " ".join(
    f"Rule {number}: be brief and kind." for number in range(40)
)
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, starter_folder(), "--cache-dir", home / "models") as server:
        yield server.ready()


@pytest.fixture
def claude(_server: Server) -> Iterator[anthropic.Anthropic]:
    """A test may leave no row behind."""
    with anthropic.Anthropic(
        base_url=_server.url, api_key="unused", max_retries=0, _strict_response_validation=True
    ) as found:
        yield found
    _server.idle()


def test_the_starter_answers(claude: anthropic.Anthropic) -> None:
    ask: Any = {"model": "any", "max_tokens": 40, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**ask)
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == block.text
    assert streamed.stop_reason == "end_turn"
    started: Any = claude.messages.create(
        **{**ask, "messages": [*ASK, {"role": "assistant", "content": "The capital"}]}
    )
    assert "Paris" in started.content[0].text


def test_two_turns_with_different_nonces_share_their_prefix(claude: anthropic.Anthropic) -> None:
    """Claude Code writes another number in front of its system prompt on every turn."""

    def turn(nonce: str, messages: list[Any]) -> anthropic.types.Message:
        system: Any = [{"type": "text", "text": BILLING.format(nonce)}, {"type": "text", "text": RULES}]
        return claude.messages.create(
            model="any", max_tokens=8, system=system, messages=messages, extra_body={"temperature": 0}
        )

    first = turn("36ee5", ASK)
    more = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And of Spain?"},
    ]
    second = turn("0aaa9", more)
    read, new = second.usage.cache_read_input_tokens or 0, second.usage.input_tokens
    counted = claude.messages.count_tokens(model="any", system=RULES, messages=more)
    assert read + new == counted.input_tokens, "the nonce is not part of what is counted either"
    assert read > 400
    assert new < 64, "only what the second turn added was computed"
