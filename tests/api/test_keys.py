"""API keys: who gets in, with which scopes, and how much they may use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from typer.testing import CliRunner

from mantou import build
from mantou.api.access import presented_key, scope_of
from mantou.api.keys import KeyFile, KeyRing, digest
from mantou.api.quotas import Quotas, RateLimited
from mantou.cli.keys import app as keys_cli
from mantou.config import Config
from mantou.errors import ConfigError
from tests.api.conftest import Running, serve

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGE: dict[str, Any] = {**ASK, "model": "x", "max_tokens": 5}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def closed(keys: KeyFile) -> Iterator[Running]:
    """A server that asks for keys: the operator's, and those of a file."""
    keys.add("seed")
    with serve(api_key="the operator's own", api_key_file=keys.path) as running:
        yield running


@pytest.fixture
def http(closed: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=closed.url, timeout=10) as found:
        yield found


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


# ---------------------------------------------------------------------- who gets in
def test_no_key_is_refused_and_health_is_open(http: httpx2.Client) -> None:
    for path in ("/v1/models", "/v1", "/stats", "/metrics", "/openapi.json", "/nowhere"):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/"):
        assert http.get(path).status_code == 200, path


@pytest.mark.parametrize("text", [b"wrong", b"the operator's ow", b"THE OPERATOR'S OWN", b"", b"\xff"])
def test_a_wrong_key_is_refused(http: httpx2.Client, text: bytes) -> None:
    assert http.get("/v1/models", headers={"x-api-key": text}).status_code == 401


def test_the_sdks_get_in_with_their_own_headers_and_raise_their_own_errors(
    closed: Running, keys: KeyFile
) -> None:
    text = keys.add("sdk")
    asked: Any = MESSAGE
    with openai.OpenAI(base_url=f"{closed.url}/v1", api_key=text, max_retries=0) as client:
        assert client.chat.completions.create(model="x", messages=ASK["messages"]).choices
    with anthropic.Anthropic(base_url=closed.url, api_key=text, max_retries=0) as client:
        assert client.messages.create(**asked).content
    with (
        openai.OpenAI(base_url=f"{closed.url}/v1", api_key="no", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="not known here"),
    ):
        client.models.list()
    with (
        anthropic.Anthropic(base_url=closed.url, api_key="no", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
    ):
        client.messages.create(**asked)


def test_a_key_opens_what_its_scopes_say(http: httpx2.Client, keys: KeyFile) -> None:
    embedder, watcher = keys.add("embedder", ["embed"]), keys.add("watcher", ["read"])
    admin = keys.add("admin", ["admin"])
    assert http.post(CHAT, json=ASK, headers=bearer(embedder)).status_code == 403
    refused = http.post(CHAT, json=ASK, headers=bearer(watcher))
    assert refused.json()["error"]["code"] == "forbidden"
    assert "the scope generate" in refused.json()["error"]["message"]
    assert http.get("/stats", headers=bearer(watcher)).status_code == 200
    assert http.get("/stats", headers=bearer(embedder)).status_code == 403
    assert http.get("/v1/models", headers=bearer(embedder)).status_code == 200
    assert http.post("/admin/cache/flush", json={}, headers=bearer(watcher)).status_code == 403
    for text in (admin, "the operator's own"):
        assert http.post("/admin/cache/flush", json={}, headers=bearer(text)).status_code == 200
        assert http.post(CHAT, json=ASK, headers=bearer(text)).status_code == 200


def test_every_route_that_generates_asks_for_the_scope_generate(http: httpx2.Client) -> None:
    document = http.get("/openapi.json", headers=bearer("the operator's own")).json()
    found = {path: scope_of("POST", path) for path, entry in document["paths"].items() if "post" in entry}
    assert found[CHAT] == found["/v1/messages"] == found["/v1/completions"] == "generate"
    assert "" not in found.values(), "a route that acts is never open"


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/v1/messages/count_tokens", "generate"),
        ("POST", "/v1/messagesx", "admin"),
        ("GET", "/healthy", "any"),
        ("GET", "/health/x", ""),
        ("POST", "/api/embed", "embed"),
        ("DELETE", "/v1/adapters/a", "admin"),
        ("POST", "/v1/requests/a/cancel", "any"),
        ("POST", "//v1/chat/completions", "admin"),
    ],
)
def test_scope_of_a_path(method: str, path: str, scope: str) -> None:
    assert scope_of(method, path) == scope


def test_where_a_key_is_looked_for() -> None:
    assert presented_key({"authorization": "bearer  a "}) == "a"
    assert presented_key({"authorization": "Basic a", "x-api-key": "b"}) == "b"
    assert presented_key({"authorization": "Bearer", "x-api-key": ""}) is None


# ---------------------------------------------------------------------- the file
def test_a_key_counts_and_stops_counting_without_a_restart(http: httpx2.Client, keys: KeyFile) -> None:
    text = keys.add("guest")
    assert http.get("/v1/models", headers=bearer(text)).status_code == 200
    keys.remove("guest")
    assert http.get("/v1/models", headers=bearer(text)).status_code == 401


def test_the_file_holds_no_key_and_is_private(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "sub" / "keys.json")
    text = file.add("a")
    assert text not in file.path.read_text()
    assert digest(text) in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.path.parent.iterdir() if "tmp" in path.name] == []


def test_a_broken_file_leaves_the_keys_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(tmp_path / "keys.json")
    text = file.add("a")
    ring = KeyRing(file.path)
    file.path.write_text("{")
    assert ring.find(text) is not None
    assert "the keys stay as they were" in caplog.text
    file.path.unlink()
    assert ring.find(text) is None, "a key file that was taken away opens nothing"
    assert ring.wanted


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "is not a key file"),
        ('{"version": 2, "keys": []}', "version 2"),
        ('{"keys": [{"name": "a", "sha256": "0", "x": 1}]}', "is not a key file"),
        ('{"keys": [{"name": "a b", "sha256": "%s"}]}' % ("0" * 64), "is no name for a key"),
        ('{"keys": [{"name": "operator", "sha256": "%s"}]}' % ("0" * 64), "is no name for a key"),
        ('{"keys": [{"name": "a", "sha256": "0"}]}', "64 hex digits"),
        ('{"keys": [{"name": "a", "sha256": "%s", "scopes": ["root"]}]}' % ("0" * 64), "must be some of"),
        ('{"keys": [{"name": "a", "sha256": "%s", "scopes": []}]}' % ("0" * 64), "must be some of"),
        ('{"keys": [{"name": "a", "sha256": "%s", "tokens_per_minute": -1}]}' % ("0" * 64), "negative"),
    ],
)
def test_a_file_that_is_no_key_file_says_why(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        KeyRing(path)


def test_cli_adds_shows_and_removes(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def run(*words: str) -> Any:
        return CliRunner().invoke(keys_cli, [*words, "--file", str(path)], env={"COLUMNS": "200"})

    made = run("add", "phone", "--scope", "embed", "--tokens-per-minute", "500")
    assert KeyRing(path).find(made.stdout.strip()) is not None
    assert f"--api-key-file {path}" in made.stderr
    shown = run("ls").stdout
    assert "phone" in shown
    assert "500" in shown
    assert made.stdout.strip() not in shown
    assert isinstance(run("add", "phone").exception, ConfigError)
    assert isinstance(run("add", "odd name").exception, ConfigError)
    assert run("rm", "phone").exit_code == 0
    assert isinstance(run("rm", "phone").exception, ConfigError)
    assert json.loads(path.read_text())["keys"] == []


# ---------------------------------------------------------------------- quotas
def test_request_quota_is_in_the_headers_and_then_a_429(http: httpx2.Client, keys: KeyFile) -> None:
    text = keys.add("slow", requests_per_minute=2)
    left = [http.post(CHAT, json=ASK, headers=bearer(text)).headers for _ in range(2)]
    assert [headers["x-ratelimit-limit-requests"] for headers in left] == ["2", "2"]
    assert [headers["x-ratelimit-remaining-requests"] for headers in left] == ["1", "0"]
    for path, body in ((CHAT, ASK), ("/v1/messages", MESSAGE)):
        refused = http.post(path, json=body, headers=bearer(text))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json()["error"]["type"] == "rate_limit_error"
    assert http.get("/v1/models", headers=bearer(text)).status_code == 200, "looking is free"


def test_the_messages_api_has_its_own_names_for_what_is_left(http: httpx2.Client, keys: KeyFile) -> None:
    text = keys.add("claude", requests_per_minute=2, tokens_per_minute=60_000)
    for left in ("1", "0", "0"):
        answer = http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": text})
        assert answer.status_code == (200 if answer.headers.get("retry-after") is None else 429)
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == left
        assert answer.headers["anthropic-ratelimit-tokens-limit"] == "60000"
        reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-requests-reset"])
        assert timedelta(0) < reset - datetime.now(UTC) + timedelta(seconds=1) < timedelta(minutes=2)
    assert answer.status_code == 429
    operator = http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": "the operator's own"})
    assert not [name for name in operator.headers if "ratelimit" in name], "no quota, no headers"


def test_a_key_cannot_see_end_go_on_from_or_delete_what_another_key_made(
    http: httpx2.Client, keys: KeyFile, closed: Running
) -> None:
    mine, other = bearer(keys.add("mine")), bearer(keys.add("other"))
    operator = bearer("the operator's own")
    url = "/v1/responses"
    made = http.post(url, json={"model": "m", "input": "Hi"}, headers=mine).json()
    closed.script.hold_after = 3
    running = http.post(url, json={"model": "m", "input": "Hi", "background": True}, headers=mine).json()
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    for response in (made, running):
        path = f"{url}/{response['id']}"
        tries = [("GET", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items"), ("DELETE", path)]
        for method, where in tries:
            assert http.request(method, where, headers=other).status_code == 404, where
        further = {"model": "m", "input": "And?", "previous_response_id": response["id"]}
        assert http.post(url, json=further, headers=other).status_code == 404
        assert http.get(path, headers=mine).json()["id"] == response["id"]
        assert http.get(path, headers=operator).status_code == 200
    assert http.get(f"{url}/{running['id']}", headers=mine).json()["status"] == "in_progress", (
        "nobody ended it"
    )
    assert http.post(f"{url}/{running['id']}/cancel", headers=mine).json()["status"] == "cancelled"
    closed.script.hold_after = None
    for key, status in ((other, 400), (mine, 200)):
        answer = http.post(url, json={"model": "m", "input": reference}, headers=key)
        assert answer.status_code == status, answer.text
    assert http.delete(f"{url}/{made['id']}", headers=mine).status_code == 200


def test_token_quota_counts_prompt_and_answer(http: httpx2.Client, keys: KeyFile) -> None:
    text = keys.add("few", tokens_per_minute=1000)
    answer = http.post(CHAT, json=ASK, headers=bearer(text))
    # The headers went out before the first token was made; the next answer's see what was used.
    usage = answer.json()["usage"]
    again = http.post(CHAT, json={**ASK, "stream": True}, headers=bearer(text))
    seen = int(again.headers["x-ratelimit-remaining-tokens"])
    assert abs(1000 - seen - usage["prompt_tokens"] * 2 - usage["completion_tokens"]) <= 60


def test_quotas_fill_evenly_and_an_overdraft_is_waited_for(keys: KeyFile, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("a", requests_per_minute=60, tokens_per_minute=600)
    (key,) = file.read()
    now = 0.0
    quotas = Quotas(lambda: now)
    for _ in range(60):
        quotas.admit(key)
    with pytest.raises(RateLimited, match="60 requests a minute; try again in 1 s"):
        quotas.admit(key)
    now = 1.0
    quotas.admit(key)
    quotas.charge(key, 600 + 99)
    now = 2.0
    with pytest.raises(RateLimited, match="600 tokens a minute; try again in 9 s") as caught:
        quotas.admit(key)
    assert caught.value.retry_after_s == 9
    assert quotas.headers(key)["x-ratelimit-remaining-tokens"] == "0"
    assert quotas.headers(key)["x-ratelimit-remaining-requests"] == "1", "a refused request takes nothing"
    now = 1000.0
    assert quotas.headers(key)["x-ratelimit-remaining-tokens"] == "600", "a bucket does not overflow"


# ---------------------------------------------------------------------- opening the server
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "my-box"])
def test_other_machines_need_a_key_or_the_flag(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--insecure-no-auth"):
        build.check(Config(host=host))
    for allowed in ({"api_key": "x" * 8}, {"api_key_file": tmp_path}, {"insecure_no_auth": True}):
        build.check(Config(host=host, **allowed))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.7"])
def test_this_machine_needs_none(host: str) -> None:
    build.check(Config(host=host))


def test_config_does_not_show_the_key() -> None:
    assert "secret" not in repr(Config(api_key="secret secret"))


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="shorter than 8"):
        KeyRing(operator="1234")
