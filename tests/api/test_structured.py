"""Structured output through every dialect, by the official SDKs, on the real process with the starter model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import anthropic
import httpx2
import jsonschema
import openai
import pydantic
import pytest

from tests.real import Server, serving, starter_folder
from tests.unit.schema_cases import cases

ASK: list[Any] = [{"role": "user", "content": "Describe a pet as JSON."}]
NAMES = (
    *(
        "object",
        "date-member",
        "enum-mixed-item",
        "tuple-member",
        "one-of-optional",
        "names-odd",
        "map-patterns-member",
    ),
    *("pattern-digits-item", "integer-between-member", "types-item", "all-of", "uuid-optional"),
)


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    tags: list[Literal["old", "small"]] = pydantic.Field(max_length=2)


SCHEMA = Pet.model_json_schema()


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    arguments = ("--cache-dir", home / "models", "--kv-quant", "8", "--batch", "8")
    with serving(home, starter_folder(), *arguments) as server:
        yield server.ready()


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    yield _server
    _server.idle()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, _strict_response_validation=True
    ) as found:
        yield found


def test_the_sdks_parse_a_model_in_chat_and_responses(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(
        model="any", messages=ASK, response_format=Pet, temperature=0, max_tokens=100
    )
    assert isinstance(chat.choices[0].message.parsed, Pet)
    assert chat.choices[0].finish_reason == "stop"
    response = client.responses.parse(
        model="any", input="Describe a pet.", text_format=Pet, temperature=0, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Pet)


def test_anthropic_answers_in_the_format(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as claude:
        message: Any = claude.messages.create(
            model="any",
            max_tokens=100,
            messages=ASK,
            extra_body={
                "temperature": 0,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        )
    Pet.model_validate_json(message.content[0].text)
    assert message.stop_reason == "end_turn"


def test_raw_text_takes_choices_regexes_and_grammars(client: openai.OpenAI) -> None:
    def say(**extra: Any) -> str:
        answer = client.completions.create(
            model="any", prompt="The answer is", max_tokens=30, temperature=0, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert say(guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"\d{3}-\d{4}", say(structured_outputs={"regex": r"\d{3}-\d{4}"}))
    assert re.fullmatch("ab+", say(guided_grammar='start: "a" B\nB: /b{1,3}/'))
    assert say(response_format={"type": "json_schema", "schema": {"const": [1, None]}}) == "[1, null]"


def test_many_schemas_in_one_batch_are_valid_and_their_neighbour_does_not_change(
    client: openai.OpenAI, server: Server
) -> None:
    """KV of 8 bits, drafts by n-grams, rows of different grammars and one without."""
    schemas = dict(cases())

    def free() -> str:
        answer = client.chat.completions.create(model="any", messages=ASK, temperature=0, max_tokens=60)
        return answer.choices[0].message.content or ""

    def ask(name: str) -> str | None:
        wish: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schemas[name]}}
        answer = client.chat.completions.create(
            model="any", messages=ASK, response_format=wish, temperature=0.7, seed=1, max_tokens=120
        )
        text = answer.choices[0].message.content or ""
        if answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(text), schemas[name])
            return text
        return None

    before = free()
    with ThreadPoolExecutor(8) as pool:
        neighbour = pool.submit(free)
        answers = list(pool.map(ask, NAMES))
    assert neighbour.result() == before
    assert sum(answer is not None for answer in answers) >= len(NAMES) - 3


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "any",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}},
    }
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_bombs_end_in_a_sentence_and_the_server_goes_on(server: Server, client: openai.OpenAI) -> None:
    def refused(body: dict[str, Any]) -> str:
        answer: httpx2.Response = server.post({"messages": ASK, "max_tokens": 4, **body})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]

    assert "repeats" in refused({"guided_regex": "(a{1000}){1000}"})
    assert "nested" in refused({"guided_json": _nested(400)})
    assert "characters" in refused({"guided_json": {"enum": ["x" * 10_000_000]}})
    assert "properties" in refused({"guided_json": {"properties": {f"p{n}": {} for n in range(5000)}}})
    assert "requires itself without end" in refused({"guided_json": {"$ref": "#"}})
    assert client.completions.create(model="any", prompt="x", max_tokens=1).choices


def _nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found
