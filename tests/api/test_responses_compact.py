"""/v1/responses/compact: what it answers, that a later request goes on from it, and what it refuses."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from tests.api.conftest import Running
from tests.fakes_api import byte_tokenizer

URL = "/v1/responses/compact"
SUMMARY = "The user is Zoë; a.txt is read, b.txt is left to do. 👋"
ITEMS: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "I am Zoë."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Read a.txt, then b.txt."},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.txt"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "4711"},
]


def prompt(server: Running) -> str:
    assert server.engine is not None
    return byte_tokenizer().decode(server.engine.requests[-1].prompt)


def test_a_conversation_goes_on_from_what_comes_back(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: SUMMARY
    found = client.responses.compact(model="any", input=ITEMS, instructions="Speak French.")
    assert found.object == "response.compaction" and found.id.startswith("resp_")
    # OpenAI's type of a message in an output is the assistant's, though the user's are what it says comes back.
    output: Any = found.to_dict(warnings=False)["output"]
    *said, item = output
    assert [(one["role"], one["content"][0]["text"]) for one in said] == [
        ("user", "I am Zoë."),
        ("user", "Read a.txt, then b.txt."),
    ]
    assert item["type"] == "compaction" and item["id"].startswith("cmp_")
    assert found.usage.output_tokens == len(SUMMARY.encode()) + 1
    seen = prompt(server)
    assert "Speak French." in seen and "4711" in seen and "summary of our conversation" in seen

    server.script.reply = lambda request: "Bien."
    client.responses.create(model="any", input=[*said, item, {"role": "user", "content": "And b.txt?"}])
    seen = prompt(server)
    assert SUMMARY in seen and "4711" not in seen and "Hello!" not in seen
    order = ["I am Zoë.", "Read a.txt, then b.txt.", SUMMARY, "And b.txt?"]
    assert sorted(order, key=seen.index) == order
    assert seen.count("user\n") == 2, "what the user said before is one message, so that turns alternate"


def test_a_stored_response_and_a_compaction_are_compacted(http: httpx2.Client, server: Running) -> None:
    first = http.post("/v1/responses", json={"input": "I am Zoë."}).raise_for_status().json()
    server.script.reply = lambda request: SUMMARY
    once = http.post(URL, json={"previous_response_id": first["id"]}).raise_for_status().json()
    assert "I am Zoë." in prompt(server)
    again = http.post(URL, json={"input": [*once["output"], {"role": "user", "content": "Go on."}]})
    *said, item = again.raise_for_status().json()["output"]
    assert SUMMARY in prompt(server)
    assert [one["content"][0]["text"] for one in said] == ["I am Zoë.", "Go on."]
    assert item["type"] == "compaction"
    assert http.get(f"/v1/responses/{once['id']}").status_code == 404, "nothing keeps it"


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": 7}, "input", 400),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content", 400),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]},
            "input[0].encrypted_content",
            400,
        ),
        ({"input": "x", "instructions": 1}, "instructions", 400),
        ({"previous_response_id": "resp_0"}, "previous_response_id", 404),
    ],
)
def test_bad_bodies(http: httpx2.Client, body: Any, param: str, status: int) -> None:
    answer = http.post(URL, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_damaged_summary_is_refused(http: httpx2.Client, server: Running) -> None:
    server.script.reply = lambda request: SUMMARY
    item = http.post(URL, json={"input": "Hi"}).raise_for_status().json()["output"][-1]
    item["encrypted_content"] = item["encrypted_content"][:-8] + "AAAAAAA="
    answer = http.post("/v1/responses", json={"input": [item]})
    assert answer.status_code == 400 and "was changed on its way" in answer.json()["error"]["message"]


def test_the_model_fails(http: httpx2.Client, server: Running) -> None:
    server.script.fail_after = 1
    assert http.post(URL, json={"input": "Hi"}).status_code == 500


def test_its_path_is_no_response_s(http: httpx2.Client) -> None:
    answer = http.options(URL)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
