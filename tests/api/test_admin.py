"""Routes that describe the server, and the checks on where a request comes from."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import httpx2
import openai
import pytest

from mantou.api.guard import Guard, host_name
from mantou.metrics import Histogram
from tests.api.conftest import Running
from tests.fakes_api import INFO

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def test_health_is_exact(http: httpx2.Client) -> None:
    answer = http.get("/health")
    assert answer.content == b'{"status": "ok"}'
    assert answer.headers["content-type"] == "application/json"
    assert http.head("/health").status_code == 200


def test_index_names_every_route(http: httpx2.Client) -> None:
    index = http.get("/v1").json()
    assert (index["name"], index["model"]) == ("mantou", INFO.id)
    for endpoint in index["endpoints"]:
        method, path = endpoint.split()
        path = path.replace("/models/{id}", f"/models/{INFO.id}")
        answer = http.request(method, path.replace("{id}", "x"), json={} if method == "POST" else None)
        if "{id}" in endpoint and answer.status_code == 404:
            assert answer.json()["error"]["message"] != "not found", f"no route: {endpoint}"
        else:
            assert answer.status_code in ((200, 400) if method == "POST" else (200,)), endpoint


def test_models_lists_the_served_one_first(http: httpx2.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [row["id"] for row in listed["data"]] == [INFO.id, "other/model"]
    assert listed["data"][0]["context_window"] == INFO.context_length
    assert http.get(f"/v1/models/{INFO.id}").json() == listed["data"][0]
    assert http.get("/v1/models/no/such").json()["error"]["code"] == "model_not_found"


def test_library_is_scanned_once_in_a_while(http: httpx2.Client, server: Running) -> None:
    http.get("/library")
    scans = server.library_calls
    assert http.get("/library").json()["models"][1]["repo_id"] == "other/model"
    assert server.library_calls == scans


def test_stats(http: httpx2.Client) -> None:
    stats = http.get("/stats").json()
    assert stats["server"]["owner"] == "serve"
    assert stats["server"]["state"] == "ready"
    assert stats["batch"] == {
        "configured": 8,
        "batched": True,
        "active_rows": 0,
        "waiting": 0,
        "max_waiting": 64,
    }
    assert stats["kv_quant"]["mode"] == "float32"
    assert stats["admission"]["enforced_context_tokens"] is None
    assert stats["engine"]["steps"] == 7


def test_downloads(http: httpx2.Client, server: Running) -> None:
    with server.service.board.task("some/model", total_bytes=10) as task:
        task.stage("download", total_bytes=10)
        task.advance(4)
        row = http.get("/downloads").json()["downloads"][-1]
    assert (row["repo_id"], row["state"], row["received_bytes"], row["total_bytes"]) == (
        "some/model",
        "active",
        4,
        10,
    )


def test_metrics_have_vllm_names(http: httpx2.Client) -> None:
    http.post(CHAT, json=ASK)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    names = set(re.findall(r"^([a-z_:0-9]+)\{", answer.text, re.MULTILINE))
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "mantou_engine_steps_total",
    ):
        assert name in names
    assert f'vllm:kv_cache_usage_perc{{model_name="{INFO.id}"}} 0.25' in answer.text
    done = re.search(
        r'vllm:request_success_total\{finished_reason="stop",model_name="[^"]*"\} (\S+)', answer.text
    )
    assert done is not None
    assert float(done[1]) >= 1


def test_histogram_counts_are_cumulative() -> None:
    histogram = Histogram((1, 2))
    for value, count in ((0.5, 1), (1, 2), (1.5, 1), (9, 3)):
        histogram.observe(value, count)
    assert histogram.cumulative() == [(1, 3), (2, 4), (float("inf"), 7)]
    assert (histogram.count, histogram.sum) == (7, 0.5 + 2 + 1.5 + 27)


def test_openapi_describes_what_is_served(http: httpx2.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for path in document["paths"]:
        path = path.replace("{model_id}", INFO.id).replace("{response_id}", "x").replace("{request_id}", "x")
        answer = http.get(path)
        if answer.status_code == 404:
            assert answer.json()["error"]["message"] != "not found", f"no route: {path}"
        else:
            assert answer.status_code in (200, 405), path
    chat = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["minimum"] == 0
    refs = set(re.findall(r"#/components/schemas/(\w+)", http.get("/openapi.json").text))
    assert refs <= set(document["components"]["schemas"])
    names = [entry[kind]["operationId"] for entry in document["paths"].values() for kind in entry]
    assert len(names) == len(set(names))


def test_page_links_the_routes(http: httpx2.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for path in re.findall(r'href="([^"]+)"', page.text):
        assert http.get(path).status_code == 200


# ---------------------------------------------------------------------- where a request comes from
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("10.0.0.7", 403),
    ],
)
def test_host(http: httpx2.Client, host: str, status: int) -> None:
    for path in ("/health", "/v1/models"):
        assert http.get(path, headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), ("http://127.0.0.1", 403), ("https://evil.example", 403), ("null", 403), ("same", 200)],
)
def test_origin(http: httpx2.Client, server: Running, origin: str | None, status: int) -> None:
    sent = server.url if origin == "same" else origin
    answer = http.post(CHAT, json=ASK, headers={"origin": sent} if sent else {})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers, "CORS is off by default"


def test_allowed_origin(serving: Any) -> None:
    origin = "https://chat.example"
    with serving(allow_origins=(origin,)) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        answer = http.post(CHAT, json=ASK, headers={"origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        assert http.post(CHAT, json=ASK, headers={"origin": "https://evil.example"}).status_code == 403
        assert http.get("/health", headers={"host": "chat.example"}).status_code == 200
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        assert http.options(CHAT, headers=preflight).status_code == 200


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("192.168.0.4", True),
        ("mybox", True),
        ("mybox.local", True),
        ("fe80::1", True),
        ("evil.example", False),
    ],
)
def test_server_on_all_addresses_answers_to_names_that_cannot_be_rebound(host: str, known: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert Guard(app, host="0.0.0.0", allow_origins=())._knows(host) is known


def test_host_name() -> None:
    assert [host_name(netloc) for netloc in ("A:1", "[::1]:2", "", "[bad")] == ["a", "::1", "", ""]


# ---------------------------------------------------------------------- start
def test_import_of_the_api_pulls_in_nothing_slow() -> None:
    """The server must answer /health before the model is there, so the text side and the rest load later."""
    late = ("mlx", "tokenizers", "jinja2", "prometheus_client", "huggingface_hub", "transformers", "pydantic")
    code = f"import sys, mantou.api.server; print([m for m in {late!r} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_stop_frees_the_rows_of_open_requests(serving: Any, stream: bytes) -> None:
    with serving(grace_s=0) as running:
        running.script.hold_after = 2
        wire = running.wire()
        wire.post(CHAT, b'{"stream": %b, "messages": [{"role": "user", "content": "x"}]}' % stream)
        running.engine.wait_for(lambda engine: engine.num_rows == 1)
        running.shut_down()
        assert len(running.engine.cancelled) == 1


def test_sdk_error_carries_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=ASK["messages"], temperature=-1)
    assert caught.value.param == "temperature"
