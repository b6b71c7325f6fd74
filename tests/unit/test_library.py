from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mantou
from mantou.data import Message
from mantou.errors import BadRequest, ConfigError, ContextOverflow, MantouError, ModelError, QueueFull
from mantou.library import Completion, Mailboxes, Model
from tests.unit import chat_folders
from tests.unit.model_folders import write_chat_model, write_model

QUESTIONS = ("the quick brown fox", "abc", "smile at the lazy dog", "user and assistant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with mantou.load(str(folder), batch=2, max_waiting=3, prefill_chunk=16) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test no row, no waiting request and no queue of events is left."""
    yield
    if "model" not in request.fixturenames:
        return
    loaded: Model = request.getfixturevalue("model")
    stats = settle(loaded)
    assert (stats["running"], stats["waiting"], stats["kv"]["slots"]) == (0, 0, 0)
    assert not loaded._mailboxes._queues


def settle(model: Model) -> Any:
    """The engine's numbers once it has done what was asked for until now."""
    model.engine.call(lambda: None).result(60)
    return model.engine.stats()


def as_tuple(answer: Completion) -> tuple[str, str, int]:
    return answer.text, answer.finish, answer.usage.completion_tokens


def test_a_model_says_what_it_is(model: Model, folder: Path) -> None:
    assert model.info.id == folder.name
    assert (model.info.model_type, model.info.vocab_size, model.info.context_length) == ("llama", 512, 256)
    assert model.info.num_layers == {"full": 2}


def test_a_string_is_one_user_message(model: Model) -> None:
    answer = model.generate(QUESTIONS[0], max_tokens=12)
    assert answer.text
    assert (answer.finish, answer.usage.completion_tokens) == ("length", 12)
    for chat in ([Message("user", QUESTIONS[0])], [{"role": "user", "content": QUESTIONS[0]}]):
        again = model.generate(chat, max_tokens=12)
        assert as_tuple(again) == as_tuple(answer)
        # The prefix store remembers the prompt.
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_a_stream_is_the_answer_in_pieces(model: Model) -> None:
    whole = model.generate(QUESTIONS[0], max_tokens=20, temperature=1.0, seed=3)
    events = list(model.stream(QUESTIONS[0], max_tokens=20, temperature=1.0, seed=3))
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish == whole.finish
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(events) > 2


def test_plain_text_is_continued_without_the_template(model: Model) -> None:
    answer = model.complete("the quick", max_tokens=8)
    assert answer.usage.prompt_tokens == len(model.tokenizer.encode("the quick", add_special_tokens=True))
    streamed = "".join(event.text for event in model.stream_text("the quick", max_tokens=8))
    assert streamed == answer.text


def test_a_batch_equals_one_by_one_even_if_it_is_longer_than_the_queue(model: Model) -> None:
    chats = [f"{question} {i}" for i in range(3) for question in QUESTIONS]
    wish: dict[str, Any] = {"max_tokens": 10, "temperature": 0.9, "top_p": 0.95}
    together = model.batch(chats, seed=5, **wish)
    alone = [model.generate(chat, seed=5 + i, **wish) for i, chat in enumerate(chats)]
    assert [as_tuple(answer) for answer in together] == [as_tuple(answer) for answer in alone]


def test_an_empty_batch_has_no_answers(model: Model) -> None:
    assert model.batch([]) == []


def test_a_stop_string_ends_the_text_before_it_and_frees_the_row(model: Model) -> None:
    whole = model.generate(QUESTIONS[0], max_tokens=40, temperature=1.0)
    stop = whole.text[5:8]
    answer = model.generate(QUESTIONS[0], max_tokens=200, temperature=1.0, stop=[stop])
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish == "stop"
    assert 0 < answer.usage.completion_tokens < 40


def test_leaving_a_stream_early_frees_its_row(model: Model) -> None:
    before = settle(model)["requests"].get("cancelled", 0)
    for event in model.stream(QUESTIONS[0], max_tokens=None):
        assert event.finish is None
        break
    assert settle(model)["requests"]["cancelled"] == before + 1


def test_a_stream_that_nobody_reads_frees_its_row_when_it_is_dropped(model: Model) -> None:
    before = settle(model)["requests"].get("cancelled", 0)
    stream = model.stream(QUESTIONS[0], max_tokens=None)
    del stream
    assert settle(model)["requests"]["cancelled"] == before + 1


def test_the_queue_is_bounded_and_a_refused_stream_leaves_nothing_behind(model: Model) -> None:
    streams = [model.stream(QUESTIONS[0], max_tokens=None) for _ in range(2)]
    for stream in streams:
        next(stream)  # it has a row
    streams += [model.stream(QUESTIONS[0], max_tokens=None) for _ in range(3)]
    with pytest.raises(QueueFull):
        model.stream(QUESTIONS[0])
    with pytest.raises(QueueFull):
        model.batch(QUESTIONS)
    for stream in streams:
        stream.close()


def test_several_threads_share_the_batch(model: Model) -> None:
    questions = QUESTIONS[:3]  # as many as may wait, should the engine be slow to take one
    expected = [as_tuple(model.generate(question, max_tokens=12)) for question in questions]
    found: dict[int, tuple[str, str, int]] = {}

    def ask(index: int) -> None:
        found[index] = as_tuple(model.generate(questions[index], max_tokens=12))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(questions))] == expected


# ------------------------------------------------------------------ errors
def test_a_prompt_beyond_the_context_is_refused(model: Model) -> None:
    with pytest.raises(ContextOverflow, match="and the context 256; shorten it"):
        model.generate("word " * 300)


def test_an_answer_ends_where_the_context_does(model: Model) -> None:
    answer = model.generate(
        "abc", max_tokens=None, logit_bias=tuple((t, -100.0) for t in model.tokenizer.eos)
    )
    assert answer.finish == "length"
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 256


def test_a_request_that_fails_raises_and_the_next_one_is_served(model: Model) -> None:
    with pytest.raises(MantouError, match="The model failed on this request"):
        model.generate("abc", logit_bias=((10**6, 1.0),))
    assert model.generate("abc", max_tokens=3).usage.completion_tokens == 3


def test_a_folder_that_cannot_be_loaded_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    broken = write_chat_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ModelError, match="download the model again"):
        mantou.load(str(broken))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        mantou.load(str(write_model(tmp_path / "mute")))
    with pytest.raises(ConfigError, match="--dtype takes"):
        mantou.load(str(folder), dtype="int4")
    with pytest.raises(ConfigError, match="--kv-quant takes"):
        mantou.load(str(folder), kv_quant="6")


def test_a_closed_model_takes_nothing_and_ends_what_runs(folder: Path) -> None:
    with mantou.load(str(folder)) as closing:
        stream = closing.stream(QUESTIONS[0], max_tokens=None)
        next(stream)
    with pytest.raises(MantouError, match="shutting down"):
        list(stream)
    with pytest.raises(MantouError, match="shutting down"):
        closing.generate("abc")


def test_events_of_unknown_requests_are_dropped() -> None:
    from mantou.data import TokenEvent

    mailboxes = Mailboxes()
    events = mailboxes.open("a")
    mailboxes.put([TokenEvent("b", (1,)), TokenEvent("a", (2,))])
    assert events.get_nowait().tokens == (2,)
    mailboxes.close("a")
    mailboxes.put([TokenEvent("a", (3,))])
    assert events.empty()


def test_a_script_that_forgets_to_close_leaves_with_its_own_exit_status(folder: Path) -> None:
    script = (
        f"from mantou import load; load({str(folder)!r}).generate('hi', max_tokens=2); raise SystemExit(3)"
    )
    left = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (left.returncode, left.stderr) == (3, "")


# ------------------------------------------------------------------ forms of the answer
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_form_of_the_answer_is_kept_as_by_the_server(model: Model) -> None:
    choice = {"type": "choice", "choice": ["red", "green"]}
    assert model.generate(QUESTIONS[0], response_format=choice, max_tokens=20).text in ("red", "green")
    assert model.complete("the quick", grammar='start: "a" "b"+ "c"', max_tokens=4).text.startswith("ab")
    answers = model.batch(QUESTIONS, response_format=choice, temperature=1.0, max_tokens=20)
    assert {answer.text for answer in answers} <= {"red", "green"}


def test_a_required_call_is_made_and_read(model: Model, tmp_path: Path) -> None:
    template = "{% if tools %}<tool_call>{% endif %}" + chat_folders.CHATML
    able = write_chat_model(tmp_path / "able")
    (able / "chat_template.jinja").write_text(template, "utf-8")
    with mantou.load(str(able)) as loaded:
        wish: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        wish["thinking_budget"] = 4  # the model of no sense thinks without end
        answer = loaded.generate(QUESTIONS[0], max_tokens=None, **wish)
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)["city"] in ("Oslo", "Rome")) == ("weather", True)
    assert (answer.text, answer.finish) == ("", "tool_calls")
    assert answer.usage.completion_tokens > 0
    with pytest.raises(BadRequest, match="cannot describe tools"):
        model.generate(QUESTIONS[0], tools=[TOOL])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of"),
        ({"response_format": {"type": "json_object"}, "grammar": 'start: "a"'}, "both say what the answer"),
        ({"grammar": "start: missing"}, "grammar cannot be used"),
        ({"tool_choice": "required"}, "at least one tool"),
        ({"thinking_budget": -1}, "at least 0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    model: Model, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        model.generate(QUESTIONS[0], **options)
    with pytest.raises(TypeError):
        model.generate(QUESTIONS[0], tempreature=1.0)
    with pytest.raises(BadRequest, match="tools needs a conversation"):
        model.complete("a", tools=[TOOL])
