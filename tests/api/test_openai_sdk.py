"""OpenAI's own client against the real server: every answer must parse as its strict types and say what was said."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.conftest import Running
from tests.fakes_api import INFO, byte_tokenizer

ASK = [{"role": "user", "content": "Hi"}]
REPLY = "Hello, wörld! 👋 How are you?"
NUM_TOKENS = len(REPLY.encode()) + 1  # and the end of sequence


def strict(value: object, kind: type) -> None:
    """The SDK builds its objects without checks; this checks."""
    kind.model_validate(value.model_dump(), strict=True)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=ASK)
    strict(answer, ChatCompletion)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == INFO.id
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == NUM_TOKENS
    assert usage.total_tokens == usage.prompt_tokens + NUM_TOKENS
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.model_extra == {"lane": "batched"}


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="any", messages=ASK, stream=True))
    for chunk in chunks:
        strict(chunk, ChatCompletionChunk)
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert last.finish_reason == "stop"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage is not None, "without stream_options usage rides on the last chunk"
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("asked", [True, False])
def test_usage_chunk_only_when_asked(client: openai.OpenAI, asked: bool) -> None:
    options = {"include_usage": asked}
    chunks = list(
        client.chat.completions.create(model="m", messages=ASK, stream=True, stream_options=options)
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    if asked:
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert "usage" in chunks[0].model_fields_set, "OpenAI sends a null in every other chunk"
    else:
        assert chunks[-1].usage is None
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_string_ends_text_and_frees_the_row(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "one two three" + " more" * 200
    server.script.hold_after = 20  # so that only a cancel can end the row
    answer = client.chat.completions.create(model="m", messages=ASK, stop=["three", "", "never"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one two three"), "tokens behind the stop are not billed"
    assert server.engine is not None
    server.engine.wait_for(lambda engine: engine.num_rows == 0)
    assert len(server.engine.cancelled) == 1


def test_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=ASK, max_completion_tokens=5, max_tokens=9)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_n_answers_have_their_own_seeds(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"seed {request.sampling.seed}"
    answer = client.chat.completions.create(model="m", messages=ASK, n=3, seed=7)
    strict(answer, ChatCompletion)
    assert [choice.message.content for choice in answer.choices] == ["seed 7", "seed 8", "seed 9"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len("seed 7") + 3
    assert server.engine is not None
    assert answer.usage.prompt_tokens == len(server.engine.requests[0].prompt), "the prompt is billed once"


def test_n_answers_streamed(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"seed {request.sampling.seed}" * (1 + request.sampling.seed % 2)
    chunks = list(client.chat.completions.create(model="m", messages=ASK, n=2, seed=2, stream=True))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["seed 2", "seed 3seed 3"]
    finishes = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == [0, 1]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_unset_seeds_differ(client: openai.OpenAI, server: Running) -> None:
    for _ in range(2):
        client.chat.completions.create(model="m", messages=ASK)
    assert server.engine is not None
    first, second = (request.sampling.seed for request in server.engine.requests)
    assert first != second


def test_chat_logprobs(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "aé"
    answer = client.chat.completions.create(model="m", messages=ASK, logprobs=True, top_logprobs=2)
    strict(answer, ChatCompletion)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "\\xc3", "\\xa9"]
    assert [entry.bytes for entry in logprobs.content] == [[0x61], [0xC3], [0xA9]]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert logprobs.content[0].top_logprobs[0].token == "a"
    assert logprobs.content[0].logprob == -0.25


def test_chat_logprobs_streamed_are_the_same(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "aé b"
    whole = client.chat.completions.create(model="m", messages=ASK, logprobs=True, top_logprobs=1)
    chunks = client.chat.completions.create(
        model="m", messages=ASK, logprobs=True, top_logprobs=1, stream=True
    )
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content


def test_reasoning(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "let me see</think>42"
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(model="m", messages=ASK, extra_body=extra)
    message = answer.choices[0].message
    assert message.content == "42"
    assert message.model_extra is not None
    assert message.model_extra["reasoning"] == "let me see"
    chunks = list(client.chat.completions.create(model="m", messages=ASK, extra_body=extra, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == "let me see"
    assert "".join(delta.content or "" for delta in deltas) == "42"


def test_reasoning_effort_switches_thinking(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "x</think>y"
    client.chat.completions.create(model="m", messages=ASK, reasoning_effort="high")
    client.chat.completions.create(model="m", messages=ASK, reasoning_effort="none")
    assert server.engine is not None
    prompts = [byte_tokenizer().decode(request.prompt) for request in server.engine.requests]
    assert prompts[0].endswith("<think>\n")
    assert not prompts[1].endswith("<think>\n")


def test_conversation_with_tools_reaches_the_template(client: openai.OpenAI, server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    client.chat.completions.create(model="m", messages=messages, tools=tools)
    client.chat.completions.create(model="m", messages=messages, tools=tools, tool_choice="none")
    assert server.engine is not None
    with_tools, without = (byte_tokenizer().decode(request.prompt) for request in server.engine.requests)
    assert '"name": "weather"' in with_tools
    assert "system\nBe brief." in with_tools
    assert "user\nWeather?" in with_tools
    assert "tool\nsunny" in with_tools
    assert "<tools>" not in without


def test_completions(client: openai.OpenAI, server: Running) -> None:
    answer = client.completions.create(model="m", prompt="Once upon")
    strict(answer, Completion)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY, "stop")
    assert answer.id.startswith("cmpl-")
    assert server.engine is not None
    assert byte_tokenizer().decode(server.engine.requests[0].prompt) == "Once upon", "no chat template"


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="m", prompt="Once", stream=True, max_tokens=5))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert (chunks[-1].choices[0].text, chunks[-1].choices[0].finish_reason) == ("", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_completions_of_several_prompts(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"{len(request.prompt)}.{request.sampling.seed}"
    answer = client.completions.create(model="m", prompt=["a", "bcd"], n=2, seed=0, echo=True)
    assert [choice.text for choice in answer.choices] == ["a1.0", "a1.1", "bcd3.0", "bcd3.1"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4


def test_completions_of_token_ids(client: openai.OpenAI, server: Running) -> None:
    tokens = byte_tokenizer().encode("hey", add_special_tokens=False)
    answer = client.completions.create(model="m", prompt=tokens, echo=True, max_tokens=2)
    assert answer.choices[0].text == "heyHe"
    assert server.engine is not None
    assert server.engine.requests[0].prompt == tuple(tokens)


def test_completions_logprobs(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "abc"
    answer = client.completions.create(model="m", prompt="x", logprobs=2)
    strict(answer, Completion)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    chunks = list(client.completions.create(model="m", prompt="x", logprobs=2, stream=True))
    offsets = [
        offset for chunk in chunks if (part := chunk.choices[0].logprobs) for offset in part.text_offset or []
    ]
    assert offsets == [0, 1, 2]


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [INFO.id, "other/model"]
    one = client.models.retrieve(INFO.id)
    assert (one.id, one.object, one.owned_by, one.created) == (INFO.id, "model", "mantou", 1_700_000_000)
    assert one.model_extra == {"context_window": INFO.context_length, "reasoning": True, "vision": False}
    with pytest.raises(openai.NotFoundError, match=INFO.id):
        client.models.retrieve("someone/else")


def test_failed_row_is_an_error_with_a_status(client: openai.OpenAI, server: Running) -> None:
    server.script.fail_after = 2
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        client.chat.completions.create(model="m", messages=ASK)
    with pytest.raises(openai.APIError, match="told to fail"):
        list(client.chat.completions.create(model="m", messages=ASK, stream=True))
