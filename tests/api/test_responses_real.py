"""/v1/responses on the real process with the starter model: the prompt cache, and a server that is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import openai

from tests.api.responses_checks import check_response, check_stream, events_of
from tests.real import serving, starter_folder

URL = "/v1/responses"
RULES = "You are a helpful assistant. " + " ".join(
    f"Rule {number}: be brief and kind." for number in range(24)
)
ASK = "What is the capital of France? Answer in one short sentence."


def test_a_conversation_outlives_a_killed_server(tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = (starter_folder(), "--cache-dir", tmp_path / "models", "--response-store", store)
    with serving(tmp_path / "home", *arguments) as server:
        client = openai.OpenAI(base_url=f"{server.ready().url}/v1", api_key="unused", max_retries=0)
        first = client.responses.create(model="m", input=ASK, instructions=RULES, temperature=0)
        assert "Paris" in first.output_text
        assert first.status == "completed"
        streamed = server.http.post(
            URL, json={"input": ASK, "instructions": RULES, "temperature": 0, "stream": True}
        )
        assert (
            check_stream(events_of(streamed.content))["output"][0]["content"][0]["text"] == first.output_text
        )
        second = client.responses.create(
            model="m",
            input="And of Spain?",
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=40,
        )
        assert second.usage is not None
        cached, total = second.usage.input_tokens_details.cached_tokens, second.usage.input_tokens
        assert cached > 250
        assert total - cached < 64, "only what the second turn added was computed"
        waits = client.responses.create(
            model="m", input="Count.", background=True, extra_body={"logit_bias": _never_end()}
        )
        server.rows(running=1)
        assert client.responses.retrieve(waits.id).status in ("queued", "in_progress")
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        client.close()
    with serving(tmp_path / "home", *arguments) as server:
        client = openai.OpenAI(base_url=f"{server.ready().url}/v1", api_key="unused", max_retries=0)
        assert client.responses.retrieve(second.id) == second
        broken = check_response(server.http.get(f"{URL}/{waits.id}").json())
        assert (broken["status"], broken["error"]["code"]) == ("failed", "server_error")
        replayed = events_of(server.http.get(f"{URL}/{waits.id}?stream=true").content)
        assert check_stream(replayed) == broken
        third = client.responses.create(
            model="m", input="Thanks.", previous_response_id=second.id, temperature=0, max_output_tokens=8
        )
        assert third.usage is not None and second.usage is not None
        assert third.usage.input_tokens > second.usage.input_tokens
        client.close()
        server.idle()


def _never_end() -> dict[str, Any]:
    """The end of a turn, as the starter model spells it."""
    return {"2": -100}
