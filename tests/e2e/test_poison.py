"""The poison list under load: each ends in a clear error, and the neighbours' tokens do not change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from tests.e2e.poison import MESSAGES, NAN_TOKEN, OLLAMA, POISONS, TEXT, Poison
from tests.real import DEADLINE_S, Server, serving, tiny_folder

NUM_NEIGHBOURS = 3
_TRAPS = (
    "{% for m in messages %}{% if m.content == 'RAISE' %}{{ raise_exception('no such turn') }}"
    "{% elif m.content == 'LOOP' %}{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}"
    "{% endfor %}{% endfor %}"
    "{% elif m.content == 'REACH' %}{{ ''.__class__.__mro__ }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model whose template has traps in it, and one token whose embedding is NaN."""
    home = tmp_path_factory.mktemp("poison")
    folder = tiny_folder(home / "tiny", max_position_embeddings=4096)
    _spoil(folder)
    with serving(home / "home", folder, "--batch", "8") as found:
        yield found.ready()


def _spoil(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content["chat_template"] = _TRAPS + content["chat_template"]
    settings.write_text(json.dumps(content))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = mx.where(
        mx.arange(table.shape[0])[:, None] == NAN_TOKEN, mx.nan, table
    )
    mx.save_safetensors(str(folder / "spoilt.safetensors"), weights)
    (folder / "spoilt.safetensors").replace(folder / "model.safetensors")


class Neighbour:
    """Asks the same thing over and over; keeps every answer."""

    def __init__(self, server: Server, number: int) -> None:
        self._url = server.url
        self._body = {"prompt": f"the quick brown fox {number}", "seed": number, "max_tokens": 24}
        self._body |= {"temperature": 0.8, "logprobs": 0}
        self.answers: list[tuple[list[str], str]] = []

    def ask(self) -> None:
        answer = httpx2.post(self._url + TEXT, json=self._body, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        self.answers.append((choice["logprobs"]["tokens"], choice["text"]))

    def ask_until(self, over: threading.Event) -> None:
        self.ask()
        while not over.is_set():
            self.ask()


def sentence_of(poison: Poison, answer: httpx2.Response) -> str:
    """What the error says, in the shape of the route's own API."""
    error = answer.json()["error"]
    if poison.path == OLLAMA:
        return error
    if poison.path == MESSAGES:
        assert answer.json()["type"] == "error"
    return error["message"]


def check(server: Server, poison: Poison) -> str | None:
    """What is wrong with the answer to a poison."""
    answer = httpx2.request(poison.method, server.url + poison.path, content=poison.body, timeout=DEADLINE_S)
    if answer.status_code == 200 and poison.answers:
        return None
    if not (answer.status_code == 500 if poison.fails else 400 <= answer.status_code < 500):
        return f"{poison.name}: {answer.status_code} {answer.text[:300]}"
    sentence = sentence_of(poison, answer)
    if not sentence or poison.fails not in sentence or len(sentence) > 500 or "Traceback" in sentence:
        return f"{poison.name}: no clear sentence: {sentence[:300]!r}"
    return None


def test_every_poison_ends_in_a_clear_error_and_no_neighbour_notices(server: Server) -> None:
    assert len(POISONS) >= 50
    neighbours = [Neighbour(server, number) for number in range(NUM_NEIGHBOURS)]
    for neighbour in neighbours:
        neighbour.ask()
    over = threading.Event()
    with ThreadPoolExecutor(NUM_NEIGHBOURS + 3) as pool:
        busy = [pool.submit(neighbour.ask_until, over) for neighbour in neighbours]
        try:
            wrong = list(filter(None, pool.map(lambda poison: check(server, poison), POISONS)))
        finally:
            over.set()
        for one in busy:
            one.result()
    assert wrong == []
    for neighbour in neighbours:
        assert len(neighbour.answers) > 1
        assert all(answer == neighbour.answers[0] for answer in neighbour.answers)
    stats = server.idle()
    assert stats["server"]["state"] == "ready"
    assert "Traceback" not in server.log, server.log[-3000:]
