"""Anthropic's own client against the real server: every answer and every event must pass its strict validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from tests.api.conftest import Running
from tests.fakes_api import INFO, byte_tokenizer

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
REPLY = "Hello, wörld! 👋 How are you?"
NUM_TOKENS = len(REPLY.encode()) + 1  # and the end of sequence
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def _anthropic(_shared: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=_shared.url, api_key="unused", max_retries=0, timeout=10, _strict_response_validation=True
    ) as found:
        yield found


@pytest.fixture
def claude(server: Running, _anthropic: anthropic.Anthropic) -> anthropic.Anthropic:
    return _anthropic


def prompt_of(server: Running) -> str:
    """What the model read for the last request, special tokens and all."""
    assert server.engine is not None
    return byte_tokenizer()._backend.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)


def streamed(claude: anthropic.Anthropic, **ask: Any) -> tuple[list[RawMessageStreamEvent], Message]:
    """Every event as it came, and the message that the SDK makes of the same stream."""
    events: list[RawMessageStreamEvent] = []
    with claude.messages.stream(model="any", **{"max_tokens": 100, "messages": ASK, **ask}) as stream:
        raw = stream._raw_stream
        original = raw._iterator

        def seen() -> Iterator[RawMessageStreamEvent]:
            for event in original:
                events.append(event.model_copy(deep=True))
                yield event

        raw._iterator = seen()
        message = stream.get_final_message()
    return events, message


def plain(message: Message) -> dict[str, Any]:
    """What two answers to one request must have in common."""
    return message.model_dump(exclude={"id"}, exclude_none=True) | {
        "content": [block.model_dump(exclude_none=True) for block in message.content]
    }


def kinds(events: list[RawMessageStreamEvent]) -> list[str]:
    """Event types, with runs of deltas of one kind as one."""
    found: list[str] = []
    for event in events:
        kind = event.delta.type if event.type == "content_block_delta" else event.type
        if not (kind.endswith("_delta") and found[-1:] == [kind]):
            found.append(kind)
    return found


# ------------------------------------------------------------------ text
def test_message(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="any", max_tokens=100, messages=ASK)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", INFO.id)
    assert answer.id.startswith("msg_")
    assert [(block.type, block.text) for block in answer.content] == [("text", REPLY)]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == NUM_TOKENS
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (3, 0)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


def test_stream_has_the_events_in_order(claude: anthropic.Anthropic) -> None:
    events, message = streamed(claude)
    assert kinds(events) == [
        "message_start",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].type == "message_start"
    assert events[0].message.content == []
    assert events[0].message.usage.input_tokens > 0
    whole = claude.messages.create(model="any", max_tokens=100, messages=ASK)
    assert plain(message) == plain(whole)


def test_ping_comes_behind_the_first_block_start(http: httpx2.Client) -> None:
    text = http.post("/v1/messages", json={"max_tokens": 9, "messages": ASK, "stream": True}).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert names.count("ping") == 1
    assert "[DONE]" not in text


def test_text_stream_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="any", max_tokens=100, messages=ASK) as stream:
        assert "".join(stream.text_stream) == REPLY


def test_async_client_and_beta_route(server: Running) -> None:
    import asyncio

    async def ask() -> str:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="unused", max_retries=0, _strict_response_validation=True
        ) as client:
            answer = await client.beta.messages.create(
                model="any", max_tokens=100, messages=ASK, betas=["interleaved-thinking-2025-05-14"]
            )
            (block,) = answer.content
            assert block.type == "text"
            return block.text

    assert asyncio.run(ask()) == REPLY


def test_an_empty_answer_is_one_empty_text_block(server: Running, claude: anthropic.Anthropic) -> None:
    server.script.reply = lambda request: ""
    whole = claude.messages.create(model="any", max_tokens=5, messages=ASK)
    assert [(block.type, block.text) for block in whole.content] == [("text", "")]
    assert plain(streamed(claude, max_tokens=5)[1]) == plain(whole)


# ------------------------------------------------------------------ how it ends
def test_max_tokens_ends_an_answer(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="any", max_tokens=5, messages=ASK)
    assert (answer.content[0].text, answer.stop_reason, answer.usage.output_tokens) == (
        "Hello",
        "max_tokens",
        5,
    )
    assert streamed(claude, max_tokens=5)[1].stop_reason == "max_tokens"


def test_the_matched_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    stops = ["nowhere", "How", " 👋"]
    whole = claude.messages.create(model="any", max_tokens=100, messages=ASK, stop_sequences=stops)
    assert whole.content[0].text == "Hello, wörld!"
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", " 👋")
    assert plain(streamed(claude, stop_sequences=stops)[1]) == plain(whole)


def test_a_full_context_is_not_called_max_tokens(serving: Any) -> None:
    with (
        serving(context_length=40) as running,
        anthropic.Anthropic(base_url=running.url, api_key="x") as client,
    ):
        answer = client.messages.create(model="any", max_tokens=100, messages=ASK)
        assert answer.stop_reason == "model_context_window_exceeded"
        again = client.messages.create(model="any", max_tokens=3, messages=ASK)
        assert again.stop_reason == "max_tokens"


def test_zero_max_tokens_only_reads_the_prompt(server: Running, claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model="any", max_tokens=0, messages=ASK)
    assert (whole.content, whole.stop_reason, whole.usage.output_tokens) == ([], "max_tokens", 0)
    assert server.engine is not None
    assert server.engine.requests[-1].max_tokens == 1
    events, message = streamed(claude, max_tokens=0)
    assert kinds(events) == ["message_start", "message_delta", "message_stop"]
    assert plain(message) == plain(whole)


# ------------------------------------------------------------------ thinking
THOUGHT: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}


def think(server: Running) -> None:
    server.script.reply = lambda request: "Let me see.\n</think>\n\nDone."


def test_thinking_is_signed_before_its_block_ends(server: Running, claude: anthropic.Anthropic) -> None:
    think(server)
    events, message = streamed(claude, **THOUGHT)
    assert kinds(events)[1:8] == [
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
    ]
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.type, text.text) == (
        "thinking",
        "Let me see.",
        "text",
        "Done.",
    )
    assert thinking.signature
    whole = claude.messages.create(model="any", messages=ASK, **THOUGHT)
    assert plain(message) == plain(whole)


@pytest.mark.parametrize(
    ("thinking", "opened"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_reaches_the_template(
    server: Running, claude: anthropic.Anthropic, thinking: Any, opened: bool
) -> None:
    claude.messages.create(model="any", max_tokens=2048, messages=ASK, thinking=thinking)
    assert prompt_of(server).endswith("<think>\n") == opened


def test_omitted_thinking_comes_back_through_its_signature(
    server: Running, claude: anthropic.Anthropic, serving: Any
) -> None:
    think(server)
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    events, message = streamed(claude, **hidden)
    assert "thinking_delta" not in kinds(events)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "", "Done.")
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.thinking }}:{{ m.content }}]{% endfor %}"
        "{% if enable_thinking %}<think>{% endif %}"
    )
    turns = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": "more"}]
    with (
        serving(template=template) as running,
        anthropic.Anthropic(base_url=running.url, api_key="x") as client,
    ):
        client.messages.create(model="any", max_tokens=5, messages=turns)
        assert "[assistant:Let me see.:Done.]" in prompt_of(running)


# ------------------------------------------------------------------ tools
def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def test_tool_calls_stream_piece_by_piece(server: Running, claude: anthropic.Anthropic) -> None:
    said = f"Two cities.\n</think>\n\nLet me look.\n{call('Paris')}\n{call('Rome')}\n"
    server.script.reply = lambda request: said
    ask: Any = {"tools": [WEATHER], "thinking": {"type": "adaptive"}, "max_tokens": 500}
    events, message = streamed(claude, **ask)
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta" and event.index == 2
    ]
    assert len(pieces) > 5, "arguments come while they are made"
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Two cities.")
    assert (text.type, text.text.strip()) == ("text", "Let me look.")
    assert (first.type, first.name, first.input) == ("tool_use", "weather", {"city": "Paris"})
    assert (second.type, second.name, second.input) == ("tool_use", "weather", {"city": "Rome"})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    whole = claude.messages.create(model="any", messages=ASK, **ask)
    assert without_ids(message) == without_ids(whole)


def without_ids(message: Message) -> dict[str, Any]:
    found = plain(message)
    for block in found["content"]:
        block.pop("id", None)
    return found


def test_one_call_ends_the_answer_where_parallel_calls_are_off(
    server: Running, claude: anthropic.Anthropic
) -> None:
    server.script.reply = lambda request: call("Paris") + call("Rome")
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = claude.messages.create(
        model="any", max_tokens=500, messages=ASK, tools=[WEATHER], tool_choice=choice
    )
    assert [block.input for block in answer.content] == [{"city": "Paris"}]
    assert answer.stop_reason == "tool_use"


def test_a_call_that_is_cut_off_is_kept(server: Running, claude: anthropic.Anthropic) -> None:
    server.script.reply = lambda request: call("Paris")
    cut = len(call("Paris").split("ris")[0])
    answer = claude.messages.create(model="any", max_tokens=cut, messages=ASK, tools=[WEATHER])
    assert answer.stop_reason == "max_tokens"
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.input == {"_raw": '{"city": "Pa'}
    part = streamed(claude, tools=[WEATHER], max_tokens=cut)[1]
    assert (part.content[0].type, part.stop_reason) == ("tool_use", "max_tokens")


def test_calls_of_unknown_tools_stay_text(server: Running, claude: anthropic.Anthropic) -> None:
    said = call("Paris").replace("weather", "nothing")
    server.script.reply = lambda request: said
    answer = claude.messages.create(model="any", max_tokens=500, messages=ASK, tools=[WEATHER])
    assert [(block.type, block.text) for block in answer.content] == [("text", said)]
    assert answer.stop_reason == "end_turn"


def test_tools_reach_the_template_and_none_leaves_them_out(
    server: Running, claude: anthropic.Anthropic
) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    claude.messages.create(model="any", max_tokens=5, messages=ASK, tools=[WEATHER, search])
    prompt = prompt_of(server)
    assert '"name": "weather"' in prompt
    assert '"parameters": {"type": "object"' in prompt
    assert "web_search" not in prompt
    claude.messages.create(
        model="any", max_tokens=5, messages=ASK, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert "weather" not in prompt_of(server)


def test_a_tool_that_a_search_found_is_described_there_so_that_the_prompt_so_far_stays_as_it_was(
    server: Running, claude: anthropic.Anthropic
) -> None:
    """Claude Code adds the tools that its ToolSearch finds to every later request."""
    search: Any = {"name": "search", "input_schema": {"type": "object"}}
    unused: Any = {"name": "unused", "input_schema": {"type": "object"}, "defer_loading": True}
    found: Any = {**WEATHER, "defer_loading": True}
    use: Any = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"query": "weather"}}
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    turns: list[Any] = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    ask: Any = {"model": "any", "max_tokens": 500}
    server.script.reply = lambda request: call("Paris")
    early = claude.messages.create(messages=ASK, tools=[search, unused], **ask)
    first = prompt_of(server)
    assert [block.type for block in early.content] == ["text"], "a tool that nobody has seen cannot be called"
    late = claude.messages.create(messages=[*ASK, *turns], tools=[found, search, unused], **ask)
    second = prompt_of(server)
    assert "search" in first and "weather" not in first and "unused" not in first
    assert second.startswith(first)
    assert '<function>{"name":"weather","description":"Weather of a city"' in second[len(first) :]
    assert "unused" not in second
    assert [(block.type, getattr(block, "name", "")) for block in late.content] == [("tool_use", "weather")]
    named: Any = {"type": "tool", "name": "weather"}
    claude.messages.create(messages=ASK, tools=[found, search], tool_choice=named, **ask)
    assert "weather" in prompt_of(server).partition("</tools>")[0], "what must be called has to be known"


def test_tool_runner_completes_a_loop(server: Running, claude: anthropic.Anthropic) -> None:
    """The SDK first tries a thread, then sends all; it runs the tool by itself and gets the answer."""
    wanted = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    server.script.reply = lambda request: "It is 42." if "tool\n42" in prompt_of(server) else wanted
    asked: list[int] = []

    @anthropic.beta_tool
    def double(number: int) -> str:
        """Doubles a number.

        Args:
            number: The number.
        """
        asked.append(number)
        return str(2 * number)

    runner = claude.beta.messages.tool_runner(model="any", max_tokens=500, tools=[double], messages=ASK)
    last = runner.until_done()
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "It is 42.")
    assert asked == [21]


# ------------------------------------------------------------------ the prompt
def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_blocks_become_turns_of_the_template(server: Running, claude: anthropic.Anthropic) -> None:
    document: Any = {
        "type": "document",
        "title": "Fable",
        "source": {"type": "text", "media_type": "text/plain", "data": "The fox."},
    }
    found: Any = {"type": "search_result", "title": "T", "source": "S", "content": [text("C")]}
    redacted: Any = {"type": "redacted_thinking", "data": "?"}
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sunny"), text("21")]}
    failed: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no net", "is_error": True}
    claude.messages.create(
        model="any",
        max_tokens=5,
        system=[text("Be brief."), text("Be kind.")],
        messages=[
            turn("user", text("one"), text("two"), document, found),
            turn("assistant", redacted, text("Looking."), call),
            turn("user", text("and?"), result, failed),
            {"role": "system", "content": "mind the gap"},
            {"role": "user", "content": "go on"},
        ],
        metadata={"user_id": "someone"},
        service_tier="standard_only",
    )
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n"
        "<|im_start|>user\none\ntwo\nFable\nThe fox.\nT\nS\nC<|im_end|>\n"
        "<|im_start|>assistant\nLooking.<|im_end|>\n"
        "<|im_start|>tool\nsunny\n21<|im_end|>\n"
        "<|im_start|>tool\nError: no net<|im_end|>\n"
        "<|im_start|>user\nand?\nmind the gap\ngo on<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_last_message_of_the_assistant_is_continued(server: Running, claude: anthropic.Anthropic) -> None:
    claude.messages.create(
        model="any", max_tokens=5, messages=[*ASK, {"role": "assistant", "content": "Sure, the"}]
    )
    assert prompt_of(server).endswith("<|im_start|>assistant\nSure, the")
    claude.messages.create(model="any", max_tokens=5, messages=[*ASK, {"role": "assistant", "content": ""}])
    assert prompt_of(server).endswith("<|im_start|>assistant\n")


def test_sampling_fields_reach_the_engine(server: Running, claude: anthropic.Anthropic) -> None:
    claude.messages.create(
        model="any",
        max_tokens=7,
        messages=ASK,
        extra_body={  # the SDK itself no longer knows temperature, top_p and top_k
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "seed": 3,
            "session_id": "s",
            "n": 4,
            "stop": "e",
        },
    )
    assert server.engine is not None
    (request,) = server.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 3)
    assert (request.max_tokens, request.session) == (7, "s")


@pytest.mark.parametrize("effort", ["low", "max"])
def test_effort_reaches_the_template(serving: Any, effort: str) -> None:
    with serving(template="{{ reasoning_effort }}{{ messages[0].content }}") as running:
        with anthropic.Anthropic(base_url=running.url, api_key="x") as client:
            client.messages.create(model="any", max_tokens=5, messages=ASK, output_config={"effort": effort})
        assert prompt_of(running) == f"{effort}Hi"


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};"


def test_the_billing_line_is_no_part_of_the_prompt(
    server: Running, claude: anthropic.Anthropic, client: Any
) -> None:
    def asked(system: Any) -> str:
        claude.messages.create(model="any", max_tokens=5, messages=ASK, system=system)
        return prompt_of(server)

    own = asked("You are a fox.\nIndented: x-anthropic-billing-header: no line of its own")
    assert "no line of its own" in own
    bare = asked("You are a fox.")
    assert asked([text(BILLING.format("36ee5")), text("You are a fox.")]) == bare
    assert asked(BILLING.format("0aaa9") + "\nYou are a fox.") == bare
    assert asked(BILLING.format("0aaa9")) == asked([])
    proxied = [{"role": "system", "content": BILLING.format("1bbb2") + "\nYou are a fox."}, *ASK]
    client.chat.completions.create(model="any", max_tokens=5, messages=proxied)
    assert prompt_of(server) == bare


def test_an_agent_session_grows_at_its_end_only(server: Running, claude: anthropic.Anthropic) -> None:
    """In the shape of Claude Code 2.1: nonce, reminders in the middle, cache marks that move, thinking sent back."""
    read = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    server.script.reply = lambda request: (
        "Hm.\n</think>\n\n" + ("Sunny." if "tool\n21" in prompt_of(server) else read)
    )
    prompts: list[str] = []

    def turn_of(nonce: str, messages: list[Any]) -> Message:
        answer = claude.messages.create(
            model=INFO.id,
            max_tokens=32000,
            system=[
                {"type": "text", "text": BILLING.format(nonce)},
                text("You are an agent."),
                text("\nRules."),
            ],
            messages=messages,
            tools=[WEATHER],
            thinking={"type": "adaptive"},
            output_config={"effort": "high"},
            metadata={"user_id": '{"device_id":"d","account_uuid":"","session_id":"s-1"}'},
            extra_body={
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
            },
            extra_headers={
                "x-claude-code-session-id": "s-1",
                "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
            },
        )
        prompts.append(prompt_of(server))
        return answer

    def unmarked(value: str) -> dict[str, Any]:
        return {"type": "text", "text": value}

    reminder = {"role": "system", "content": "Available agents: none."}
    first = turn_of("36ee5", [turn("user", unmarked("<context>"), text("Weather?")), reminder])
    history: list[Any] = [turn("user", unmarked("<context>"), unmarked("Weather?")), reminder]
    history.append({"role": "assistant", "content": first.to_param()["content"]})
    wanted = first.content[-1]
    assert wanted.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": wanted.id, "content": "21"}
    second = turn_of("0aaa9", [*history, turn("user", {**result, "cache_control": {"type": "ephemeral"}})])
    assert [block.type for block in second.content] == ["thinking", "text"]
    history += [turn("user", result), {"role": "assistant", "content": second.to_param()["content"]}]
    turn_of("7c0de", [*history, turn("user", text("Thanks."))])
    opening = "<|im_start|>assistant\n<think>\n"
    for before, after in pairwise(prompts):
        assert before.endswith(opening)
        assert after.startswith(before.removesuffix("<think>\n"))
    assert server.engine is not None
    assert {request.session for request in server.engine.requests} == {"s-1"}


# ------------------------------------------------------------------ counting
def test_count_tokens_is_what_a_message_bills(server: Running, claude: anthropic.Anthropic) -> None:
    ask: Any = {"model": "any", "messages": ASK, "system": "Be brief.", "tools": [WEATHER]}
    usage = claude.messages.create(max_tokens=5, **ask).usage
    billed = (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )
    assert claude.messages.count_tokens(**ask).input_tokens == billed
    assert claude.messages.count_tokens(model="any", messages=ASK).input_tokens < billed


def test_count_tokens_knows_no_limit(claude: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 2 * INFO.context_length}]
    assert claude.messages.count_tokens(model="any", messages=long).input_tokens > INFO.context_length
