"""Stored responses: second turns, asking again, the background, streams taken up again, and what is forgotten."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mantou.api.responses.store import FILE_NAME, Kept, NoResponses, SqliteResponses, open_store
from mantou.errors import ConfigError, MantouError
from tests.api.conftest import Running
from tests.api.responses_checks import check_response, check_stream, events_of, text_of
from tests.api.test_responses_sdk import CALL, REPLY, TOOLS, URL, post, prompt


# ---------------------------------------------------------------------- over HTTP
def test_a_second_turn(client: openai.OpenAI, server: Running, http: httpx2.Client) -> None:
    server.script.reply = lambda request: f"Let me look.{CALL}"
    first = client.responses.create(model="m", input="Weather?", instructions="Be kind.", tools=TOOLS)
    call = first.output[1]
    assert call.type == "function_call"
    server.script.reply = lambda request: "Sunny."
    second = client.responses.create(
        model="m",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
    )
    assert (second.output_text, second.previous_response_id, second.instructions) == (
        "Sunny.",
        first.id,
        "Be kind.",
    )
    assert prompt(server).startswith("system\nBe kind.\nuser\nWeather?\nassistant\nLet me look.\ntool\nsun\n")
    client.responses.create(
        model="m", previous_response_id=second.id, input="Sure?", instructions="Be brief."
    )
    assert prompt(server).startswith("system\nBe brief.\nuser\nWeather?")
    assert "assistant\nSunny.\nuser\nSure?" in prompt(server)
    # A streamed one can be gone on from as soon as its last event is here.
    with client.responses.stream(model="m", input="Again?", previous_response_id=second.id) as events:
        third = events.get_final_response()
    client.responses.create(model="m", previous_response_id=third.id, input="And?")
    assert "user\nAgain?" in prompt(server)


def test_references_to_items(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: "Forty-two."
    first = client.responses.create(model="m", input="How many?")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model="m", input=[reference, {"role": "user", "content": "Sure?"}])
    assert prompt(server).startswith("assistant\nForty-two.\nuser\nSure?")


def test_ask_again_and_forget(client: openai.OpenAI, http: httpx2.Client) -> None:
    made = client.responses.create(model="m", input="Hi", metadata={"k": "v"})
    again = client.responses.retrieve(made.id)
    assert again == made
    check_response(http.get(f"{URL}/{made.id}").json())
    assert client.responses.cancel(made.id) == made, "what has ended is as it is"
    gone = http.delete(f"{URL}/{made.id}")
    assert gone.json() == {"id": made.id, "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = http.request(method, f"{URL}/{made.id}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"Response with id {made.id!r} not found."
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_store_false_is_forgotten_at_once(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_input_items_come_in_pages(client: openai.OpenAI, http: httpx2.Client) -> None:
    texts = [f"Message {number}" for number in range(5)]
    first = client.responses.create(model="m", input=[{"role": "user", "content": text} for text in texts])
    made = client.responses.create(model="m", input="And now?", previous_response_id=first.id)
    for order in ("asc", "desc"):
        found = [
            item.content[0].text  # every stored item here is a message
            for item in client.responses.input_items.list(made.id, limit=2, order=order)
        ]
        expected = [*texts, REPLY, "And now?"]
        assert found == (expected if order == "asc" else expected[::-1])
    page = http.get(f"{URL}/{made.id}/input_items?limit=3").json()
    assert (page["object"], page["has_more"], len(page["data"])) == ("list", True, 3)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    for wrong in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_1"):
        assert http.get(f"{URL}/{made.id}/input_items?{wrong}").status_code == 400


def test_the_background_goes_on_without_the_client(
    client: openai.OpenAI, server: Running, http: httpx2.Client
) -> None:
    assert server.engine is not None
    server.engine.pause()
    made = client.responses.create(model="m", input="Hi", background=True)
    assert made.status == "queued"
    assert client.responses.retrieve(made.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="is not finished"):
        client.responses.create(model="m", input="Hi", previous_response_id=made.id)
    server.engine.pause(False)
    events = events_of(http.get(f"{URL}/{made.id}?stream=true").content)
    body = check_stream(events)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert (body["status"], body["background"]) == ("completed", True)
    done = client.responses.retrieve(made.id)
    assert done.output_text == REPLY
    assert done.to_dict() == body
    again = events_of(http.get(f"{URL}/{made.id}?stream=true").content)
    assert again == events, "from the store as from the run"


def test_a_stream_is_taken_up_where_it_broke(
    client: openai.OpenAI, server: Running, http: httpx2.Client
) -> None:
    server.script.hold_after = 5
    wire = server.wire()
    wire.post(URL, json.dumps({"input": "Hi", "background": True, "stream": True}).encode())
    seen = wire.read_until(b'"delta":"o"').decode()
    wire.hang_up()
    name = seen.split('"id":"')[1].split('"')[0]
    with client.responses.retrieve(response_id=name, stream=True, starting_after=4) as events:
        first = next(iter(events))
        assert (first.sequence_number, first.type) == (5, "response.output_text.delta")
        running = client.responses.retrieve(name)
        assert (running.status, running.output_text) == ("in_progress", "Hello")
        ended = client.responses.cancel(name)
        assert (ended.status, ended.output_text, ended.usage) == ("cancelled", "Hello", None)
        rest = [event.type for event in events]
    assert rest[-1] == "response.output_item.done", "a cancelled response has no event of its own"
    check_response(http.get(f"{URL}/{name}").json())
    everything = events_of(http.get(f"{URL}/{name}?stream=true").content)
    check_stream(everything, cancelled=True)
    part = events_of(http.get(f"{URL}/{name}?stream=true&starting_after=6").content)
    assert part == everything[7:]
    check_stream(part, first=7, cancelled=True)
    assert server.engine is not None
    server.engine.wait_for(lambda engine: len(engine.cancelled) == 1)


def test_only_the_background_can_be_streamed_again(http: httpx2.Client, client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="Hi")
    answer = http.get(f"{URL}/{made.id}?stream=true")
    assert answer.status_code == 400 and "background" in answer.json()["error"]["message"]
    for wrong in ("stream=maybe", "stream=true&starting_after=x", "stream=true&starting_after=-1"):
        assert http.get(f"{URL}/{made.id}?{wrong}").status_code == 400


@pytest.mark.parametrize("streamed", [True, False])
def test_the_foreground_ends_with_its_client(server: Running, http: httpx2.Client, streamed: bool) -> None:
    assert server.engine is not None
    server.script.hold_after = 5
    wire = server.wire()
    wire.post(URL, json.dumps({"input": "Hi", "stream": streamed}).encode())
    server.engine.wait_for(lambda engine: engine._held)
    seen = wire.read_until(b'"delta":"o"').decode() if streamed else ""
    wire.hang_up()
    server.engine.wait_for(lambda engine: len(engine.cancelled) == 1)
    if streamed:
        name = seen.split('"id":"')[1].split('"')[0]
        body = http.get(f"{URL}/{name}").json()
        assert (body["status"], text_of(body["output"][0])) in (
            ("cancelled", "Hello"),
            ("in_progress", "Hello"),
        )


def test_deleting_what_runs_ends_it(server: Running, client: openai.OpenAI) -> None:
    assert server.engine is not None
    server.script.hold_after = 5
    made = client.responses.create(model="m", input="Hi", background=True)
    client.responses.delete(made.id)
    server.engine.wait_for(lambda engine: len(engine.cancelled) == 1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_background_response_that_fails(
    server: Running, client: openai.OpenAI, http: httpx2.Client
) -> None:
    server.script.fail_after = 3
    made = client.responses.create(model="m", input="Hi", background=True)
    body = check_stream(events_of(http.get(f"{URL}/{made.id}?stream=true").content))
    assert (body["status"], body["error"]["message"]) == ("failed", "This row was told to fail.")


def test_without_a_store(serving: Callable[..., Any]) -> None:
    with serving(response_store="off") as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        body = check_response(http.post(URL, json={"input": "Hi"}).json())
        assert body["store"] is False
        assert http.get(f"{URL}/{body['id']}").status_code == 404
        for more in ({"store": True}, {"background": True}):
            answer = http.post(URL, json={"input": "Hi", **more})
            assert answer.status_code == 400 and "--response-store off" in answer.json()["error"]["message"]
        answer = http.post(URL, json={"input": "Hi", "previous_response_id": "resp_1"})
        assert answer.status_code == 404 and "--response-store off" in answer.json()["error"]["message"]


def test_a_restart_keeps_them(serving: Callable[..., Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    with serving(response_store=folder) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        first = post(http, input="Hi", instructions="Be kind.")
        running.script.hold_after = 3
        waits = http.post(URL, json={"input": "Hi", "background": True}).json()
        running.engine.wait_for(lambda engine: engine._held)
    with serving(response_store=folder) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        assert http.get(f"{URL}/{first['id']}").json() == first
        second = post(http, input="More", previous_response_id=first["id"])
        assert second["instructions"] == "Be kind."
        broken = check_response(http.get(f"{URL}/{waits['id']}").json())
        assert (broken["status"], text_of(broken["output"][0])) == ("failed", "Hel")
        assert "shutting down" in broken["error"]["message"]


def test_a_disk_that_fails_costs_the_store_and_not_the_answer(
    serving: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    with (
        serving(response_store=str(folder)) as running,
        httpx2.Client(base_url=running.url, timeout=10) as http,
    ):
        with sqlite3.connect(folder / FILE_NAME) as other:
            other.execute("DROP TABLE items")
        other.close()
        body = post(http, input="Hi")
        assert (body["status"], body["store"], text_of(body["output"][0])) == ("completed", False, REPLY)
        made = http.post(URL, json={"input": "Hi", "background": True}).json()
        last = check_stream(events_of(http.get(f"{URL}/{made['id']}?stream=true").content))
        assert (last["status"], last["store"]) == ("completed", False)
        assert http.get(f"{URL}/{made['id']}").json()["status"] == "completed"
        answer = http.delete(f"{URL}/resp_1")
        assert answer.status_code == 404


# ---------------------------------------------------------------------- the store itself
class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[SqliteResponses]:
    folder = tmp_path / "a" / "b" if request.param == "folder" else None
    found = SqliteResponses(folder, ttl_s=60, max_bytes=1000, clock=clock)
    yield found
    found.close()


def kept(name: str, size: int = 100, *, running: bool = False) -> Kept:
    return Kept(name, b"x" * size, b"[]", b"", running)


def test_time_forgets(store: SqliteResponses, clock: Clock) -> None:
    store.put(kept("a"), ["item"])
    clock.now += 59
    assert store.get("a") == store.of_item("item") == kept("a")
    clock.now += 1
    assert store.get("a") is None and store.of_item("item") is None
    assert not store.delete("a")


def test_size_forgets_the_longest_unused(store: SqliteResponses) -> None:
    for name in "abc":
        store.put(kept(name, 300), [f"item-{name}"])
    assert store.get("a") is not None
    store.put(kept("d", 300))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    assert store.of_item("item-b") is None
    store.put(kept("e", 5000))
    assert [name for name in "acde" if store.get(name)] == ["e"], "the newest always stays"
    store.put(kept("e", 10))
    store.put(kept("f", 10))
    assert store.get("e") == kept("e", 10)


def test_a_store_of_the_version_before_is_taken_over(tmp_path: Path, clock: Clock) -> None:
    old = SqliteResponses(tmp_path, ttl_s=0, max_bytes=1000, clock=clock)
    old.put(kept("a"))
    old.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("ALTER TABLE responses DROP COLUMN owner")
        db.execute("PRAGMA user_version = 1")
    db.close()
    for _ in range(2):
        new = SqliteResponses(tmp_path, ttl_s=0, max_bytes=1000, clock=clock)
        assert new.get("a") == kept("a")
        new.put(replace(kept("b"), owner="phone"))
        assert new.get("b") == replace(kept("b"), owner="phone")
        new.close()


def test_a_folder_has_one_server(tmp_path: Path, clock: Clock) -> None:
    first = SqliteResponses(tmp_path, ttl_s=0, max_bytes=1000, clock=clock)
    with pytest.raises(ConfigError, match="Another server"):
        open_store(str(tmp_path), ttl_s=0, max_bytes=1000)
    first.put(kept("a", running=True))
    first.put(kept("b"))
    first.close()
    clock.now += 1e9
    second = SqliteResponses(tmp_path, ttl_s=0, max_bytes=1000, clock=clock)
    assert second.interrupted() == [kept("a", running=True)]
    assert second.get("b") == kept("b")
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0, "others may not read what was said"
    second.close()


@pytest.mark.parametrize("damage", ["text", "version", "folder"])
def test_a_store_that_cannot_be_read_is_said_so(tmp_path: Path, damage: str) -> None:
    if damage == "folder":
        (tmp_path / FILE_NAME).mkdir()
    elif damage == "text":
        (tmp_path / FILE_NAME).write_bytes(b"hello " * 1000)
    else:
        with sqlite3.connect(tmp_path / FILE_NAME) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    for _ in range(2):  # the lock is free again
        with pytest.raises(ConfigError, match=r"responses\.sqlite|--response-store"):
            open_store(str(tmp_path), ttl_s=0, max_bytes=1)


def test_an_error_of_the_disk_is_a_sentence(store: SqliteResponses) -> None:
    store._db.close()
    with pytest.raises(MantouError, match="The response store failed"):
        store.get("a")
    store._db = sqlite3.connect(":memory:")


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    store = open_store("off", ttl_s=1, max_bytes=1)
    assert isinstance(store, NoResponses) and not store.keeps
    store.put(kept("a"))
    assert store.get("a") is None and not store.delete("a") and store.interrupted() == []
    store.close()
