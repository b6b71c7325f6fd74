"""The official SDK against the real process: real engine, real graph, random weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mantou import Model, load
from mantou.data import Message
from tests.real import TINY_CONTEXT, Server, serving, tiny_folder

MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what does the fox see there?"},
]
CHAT = [Message(**message) for message in MESSAGES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def _server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, folder, "--cache-dir", home / "models") as server:
        yield server.ready()


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    """The shared server. A test may leave no row behind."""
    yield _server
    _server.idle()


@pytest.fixture(scope="module")
def _client(_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{_server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture
def client(server: Server, _client: openai.OpenAI) -> openai.OpenAI:
    return _client


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[Model]:
    with load(str(folder)) as model:
        yield model


def _counts(usage: Any) -> tuple[int, int, int]:
    """What is billed. How many tokens came from a cache depends on what was asked before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


# ------------------------------------------------------------------ answers
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}])
def test_chat_streamed_whole_and_library_agree(
    client: openai.OpenAI, library: Model, sampling: dict[str, Any]
) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, **sampling}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    own = library.generate(CHAT, max_tokens=40, **sampling)
    assert whole.choices[0].message.content == text == own.text
    assert text
    assert whole.choices[0].finish_reason == own.finish == "length"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (own.usage.prompt_tokens, 40)
    assert _counts(chunks[-1].usage) == _counts(whole.usage)
    assert len(chunks) > 5  # it came in pieces


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.1, "seed": 3}])
def test_completions_streamed_whole_and_library_agree(
    client: openai.OpenAI, library: Model, sampling: dict[str, Any]
) -> None:
    ask = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 30, **sampling}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    own = library.complete("the quick brown", max_tokens=30, **sampling)
    assert whole.choices[0].text == text == own.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30
    assert _counts(chunks[-1].usage) == _counts(whole.usage)


def test_two_answers_take_the_seed_and_the_next(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 1.0}
    both = client.chat.completions.create(**ask, n=2, seed=11)
    alone = [client.chat.completions.create(**ask, seed=seed) for seed in (11, 12)]
    texts = [choice.message.content for choice in both.choices]
    assert texts == [answer.choices[0].message.content for answer in alone]
    assert texts[0] != texts[1]
    assert both.usage is not None
    assert alone[0].usage is not None
    assert both.usage.prompt_tokens == alone[0].usage.prompt_tokens  # the prompt is billed once
    assert both.usage.completion_tokens == 48


def test_prompts_in_one_body_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["the dog", "a much longer prompt about the other foxes and dogs", "fox"]
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    together = client.completions.create(**ask, prompt=prompts)
    alone = [client.completions.create(**ask, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 3


def test_max_tokens_of_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=1, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


# ------------------------------------------------------------------ logprobs, stops
def _chat_entries(client: openai.OpenAI, **options: Any) -> list[Any]:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, logprobs=True, **options
    )
    assert answer.choices[0].logprobs is not None
    return answer.choices[0].logprobs.content or []


def test_chat_logprobs(client: openai.OpenAI) -> None:
    entries = _chat_entries(client, top_logprobs=4, max_tokens=20)
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=20)
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == whole.choices[0].message.content
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 4
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0]  # greedy takes the most likely one
        assert entry.token == entry.top_logprobs[0].token
        assert -20 < tops[-1] <= entry.logprob < 0


def test_completions_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "the dog", "max_tokens": 16, "temperature": 0}
    found = client.completions.create(**ask, logprobs=2).choices[0].logprobs
    assert found is not None
    assert found.tokens
    assert found.text_offset
    assert found.token_logprobs
    assert found.top_logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 16
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:i]) for i in range(16)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())


def test_a_stop_string_across_two_tokens(client: openai.OpenAI) -> None:
    entries = _chat_entries(client, max_tokens=100)
    pieces = [bytes(entry.bytes) for entry in entries]
    text = b"".join(pieces).decode(errors="replace")
    pairs = [(first[-1:] + second[:1]).decode(errors="replace") for first, second in pairwise(pieces)]
    stops = [pair for pair in pairs[5:] if pair.isascii() and pair.isprintable()]
    assert stops, "the model says no two printable characters in a row"
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
    for stop in stops[:3]:
        whole = client.chat.completions.create(**ask, stop=[stop, "never said"])
        chunks = client.chat.completions.create(**ask, stop=stop, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.choices[0].message.content == streamed == text[: text.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert 0 < whole.usage.completion_tokens < 100


# ------------------------------------------------------------------ limits, description
def test_context_overflow_says_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * (TINY_CONTEXT + 9), max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert {str(TINY_CONTEXT), str(TINY_CONTEXT + 9)} <= set(re.findall(r"\d+", caught.value.message))


def test_the_context_bounds_an_answer_without_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[5] * (TINY_CONTEXT - 6), temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == TINY_CONTEXT


@pytest.mark.parametrize("stream", [True, False])
def test_an_adapter_that_is_not_mounted_is_refused(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="No adapter called 'poet'") as caught:
        client.completions.create(model="tiny", prompt="x", stream=stream, extra_body={"adapter": "poet"})
    assert caught.value.param == "adapter"


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").to_dict()["context_window"] == TINY_CONTEXT
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


# ------------------------------------------------------------------ numbers
def _metrics(http: httpx2.Client) -> dict[str, float]:
    """Every sample by its name and, where there is one, its reason: `name` or `name/reason`."""
    families = text_string_to_metric_families(http.get("/metrics").raise_for_status().text)
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {
        "/".join(filter(None, (sample.name, sample.labels.get("finished_reason")))): sample.value
        for sample in samples
    }


def test_metrics_and_stats_count_the_traffic(client: openai.OpenAI, server: Server) -> None:
    server.idle()
    before, stats_before = _metrics(server.http), server.stats()
    ask: dict[str, Any] = {"model": "tiny", "temperature": 0}
    for number, num_tokens in ((41, 5), (42, 9)):
        client.completions.create(**ask, prompt=[number] * 20, max_tokens=num_tokens)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    with client.completions.create(**ask, prompt=[43] * 20, max_tokens=2000, stream=True) as left:
        next(iter(left))
    stats = server.idle()
    after = _metrics(server.http)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:request_success_total/length"] == 2
    assert grown["vllm:request_success_total/abort"] == 1
    assert grown["vllm:request_success_total/error"] == 0
    assert grown["vllm:time_to_first_token_seconds_count"] == 3
    assert grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:prompt_tokens_total"] == 60
    assert grown["vllm:generation_tokens_total"] >= 5 + 9 + 1
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert after["vllm:kv_cache_usage_perc"] == after["mantou_kv_bytes"] == 0

    engine = stats["engine"]
    assert engine["generation_tokens"] == after["vllm:generation_tokens_total"]
    assert engine["prompt_tokens"] == after["vllm:prompt_tokens_total"]
    requests = Counter(engine["requests"]) - Counter(stats_before["engine"]["requests"])
    assert requests == {"length": 2, "cancelled": 1}
    finished = Counter(stats["http"]["finished"]) - Counter(stats_before["http"]["finished"])
    assert finished == {"length": 2, "abort": 1}
    assert stats["model"]["id"] == stats["server"]["model"] == "tiny"
    assert stats["server"]["state"] == "ready"
    assert stats["batch"]["active_rows"] == stats["batch"]["waiting"] == 0


def test_the_best_of_several_answers_are_those_with_the_most_likely_tokens(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["the quick", "a dog"],
        "max_tokens": 12,
        "temperature": 1.2,
    }
    every = client.completions.create(**ask, seed=5, n=4, logprobs=0)
    best = client.completions.create(**ask, seed=5, n=2, best_of=4)

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = []
    for first in (0, 4):
        ranked = sorted(every.choices[first : first + 4], key=likelihood, reverse=True)
        expected += [choice.text for choice in ranked[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None
    assert best.usage.completion_tokens == 8 * 12, "what was not sent was made all the same"
