"""Drafts over HTTP: flags, the request's fields, the bill, metrics; the real process with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mantou.config import Config
from mantou.errors import ConfigError
from mantou.spec.setup import check, vocabulary_fault
from tests.real import Server, environment, serving, tiny_folder

MESSAGES: list[Any] = [{"role": "user", "content": "what does the fox see there?"}]
ASK = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The model drafts for itself, so that some drafts are certain to be right."""
    home = tmp_path_factory.mktemp("home")
    folder = tiny_folder(home / "tiny")
    flags = ("--draft-model", folder, "--draft-kind", "ngram,model", "--num-draft-tokens", "3")
    with serving(home, folder, "--cache-dir", home / "cache" / "models", *flags) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def text(answer: Any) -> str:
    return answer.choices[0].message.content


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
@pytest.mark.parametrize(
    "speculation", [None, {"kind": "ngram"}, {"kind": "model", "num_draft_tokens": 2}, {"kind": "off"}]
)
def test_an_answer_is_the_same_with_every_kind_of_draft(
    client: openai.OpenAI, speculation: Any, sampling: dict[str, Any]
) -> None:
    plain = client.chat.completions.create(**ASK | sampling, extra_body={"speculation": False})
    assert "speculation" not in plain.usage.model_extra
    drafted = client.chat.completions.create(**ASK | sampling, extra_body={"speculation": speculation})
    assert text(drafted) == text(plain)


def test_predicted_text_that_comes_is_billed_as_accepted_drafts(
    client: openai.OpenAI, server: Server
) -> None:
    plain = client.chat.completions.create(**ASK, extra_body={"speculation": False})
    predicted = {"type": "content", "content": [{"type": "text", "text": text(plain)}]}
    body = {"speculation": {"kind": "ngram"}}
    drafted = client.chat.completions.create(**ASK, prediction=predicted, extra_body=body)
    assert text(drafted) == text(plain)
    spent = drafted.usage.model_extra["speculation"]
    assert set(spent) == {
        "drafted", "accepted", "acceptanceHistogram", "rounds", "targetCalls", "tokensPerForward", "forwardsSaved"
    }  # fmt: skip
    assert sum(spent["acceptanceHistogram"]) == spent["rounds"]
    assert spent["targetCalls"] + spent["forwardsSaved"] == drafted.usage.completion_tokens
    last = list(client.chat.completions.create(**ASK, prediction=predicted, extra_body=body, stream=True))[-1]
    assert "speculation" in last.usage.model_extra
    engine = server.stats()["engine"]
    assert engine["accepted_tokens"] <= engine["drafted_tokens"]
    metrics = {m.name: m for m in text_string_to_metric_families(server.http.get("/metrics").text)}
    for name, key in (
        ("drafts", "drafts"),
        ("draft_tokens", "drafted_tokens"),
        ("accepted_tokens", "accepted_tokens"),
    ):
        assert metrics[f"vllm:spec_decode_num_{name}"].samples[0].value == engine[key]
    places = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert sum(s.value for s in places if s.name.endswith("_total")) == engine["accepted_tokens"]


def test_fill_appends_what_a_schema_leaves_no_choice_about_and_bills_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("fill")
    folder = tiny_folder(home / "tiny")
    schema = {
        "type": "object",
        "properties": {"what does the fox see": {"const": "the fox and the dog"}},
        "required": ["what does the fox see"],
        "additionalProperties": False,
    }
    wish = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    ask = ASK | {"response_format": wish, "temperature": 0.8, "seed": 3}
    with serving(home, folder, env=environment(home, MANTOU_FILL="strict")) as running:
        server = running.ready()
        filled = server.post(ask).json()
        plain = server.post(ASK).json()
        spent = filled["usage"]["fill"]
        assert set(spent) == {"injected", "decodeSteps", "verifyAccepted", "verifyRejected", "wastedSamples"}
        assert spent["injected"] > 5
        assert spent["injected"] + spent["decodeSteps"] == filled["usage"]["completion_tokens"]
        assert plain["usage"]["fill"]["injected"] == 0
        assert server.stats()["engine"]["injected_tokens"] == spent["injected"]
        assert "injected_tokens_total{model_name=" in server.http.get("/metrics").text
    with serving(home, folder, env=environment(home)) as running:
        other = running.ready().post(ask).json()
    assert "fill" not in other["usage"]
    assert other["choices"][0]["message"]["content"] == filled["choices"][0]["message"]["content"]


def test_the_ready_card_says_who_guesses(server: Server) -> None:
    (line,) = [line for line in server.log.splitlines() if line.startswith("  drafts ")]
    assert "copies after 2 to 8 equal tokens, then draft model tiny; checking 4 drafted tokens" in line
    assert list(Path(server.output.parent, "cache", "step-costs").glob("*.json"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"speculation": {"kind": "mtp"}},
            "speculation.kind 'mtp' is not available; this server has off, ngram, model",
        ),
        ({"speculation": True}, "speculation must be an object or false, got a boolean."),
        (
            {"speculation": {"num_draft_tokens": 0}},
            "speculation.num_draft_tokens must be between 1 and 64, got 0.",
        ),
        ({"prediction": {"type": "content", "content": 3}}, "prediction must be of type content"),
        ({"prediction": "text"}, "prediction must be an object, got a string."),
    ],
)
def test_a_wrong_wish_is_one_sentence(server: Server, body: dict[str, Any], message: str) -> None:
    answer = server.post(ASK | body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"draft_kind": "model"}, "--draft-kind model needs --draft-model"),
        (
            {"draft_kind": "wish"},
            "--draft-kind takes ngram, auto, model, eagle, eagle3, dspark, dflash2, mtp, assistant, off",
        ),
        ({"draft_kind": "eagle"}, "--draft-kind eagle needs --draft-model"),
        ({"draft_kind": "mtp", "mtp": False}, "what --mtp off turns off"),
        ({"draft_model": "x", "mtp": True}, "leave it out, or --draft-model"),
        ({"draft_kind": "off,ngram"}, "--draft-kind off stands alone"),
        ({"ngram_min": 5, "ngram_max": 4}, "--ngram-max 4 is below --ngram-min 5"),
        ({"fill": "loose"}, "MANTOU_FILL takes strict or echo, not 'loose'"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Config(**flags))


def test_a_draft_model_with_another_vocabulary_is_told_apart() -> None:
    target = {f"t{i}": i for i in range(100)}
    assert vocabulary_fault(target, dict(list(target.items())[:99])) is None
    assert vocabulary_fault(target, target | {"<pad>": 100}) is None
    assert vocabulary_fault(target, target | {"t7": 8}) == "'t7' is token 8 there and token 7 here"
    assert vocabulary_fault(target, {f"u{i}": i for i in range(100)}) == "only 0 of 100 tokens are known here"
