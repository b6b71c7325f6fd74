"""A server that is killed in the middle of an answer: a repeated request gets all of it, and pays for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.real import Server, events, eventually

NUM_TOKENS = 1200
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "what is there?"}],
    "max_tokens": NUM_TOKENS,
    "temperature": 0.9,
    "logit_bias": {"0": -100, "2": -100},  # drawn at this temperature, either would end the answer
    "logprobs": True,
}


def interrupted(server: Server, body: dict[str, Any], num_pieces: int = 60) -> str:
    """Reads the beginning of an answer and hangs up."""
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        pieces: list[str] = []
        for event in events(answer.iter_lines()):
            pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
            if len(pieces) > num_pieces:
                flushed = server.http.post("/admin/cache/flush").raise_for_status().json()
                assert flushed["flushed"] is True and flushed["generation_checkpoints"]["saved"]
                assert flushed["ssd_cache"]["pending_snapshots"] == 0
                return "".join(pieces)
    raise AssertionError("the answer was over before it could be interrupted")


def test_an_answer_outlives_its_server(serve: Callable[..., Server], tmp_path: Path) -> None:
    flags = ("--ssd-cache", str(tmp_path / "ssd"), "--generation-checkpoint", "16")
    seeded = {**BODY, "seed": 7}
    first = serve(*flags).ready()
    assert "answers saved every 16 tokens" in eventually(
        lambda: "ready on" in first.log and first.log, "a card"
    )
    whole = first.post(seeded).raise_for_status().json()
    assert first.stats()["generation_checkpoints"]["entries"] == 0, "a complete answer leaves nothing"
    said, drawn = interrupted(first, seeded), interrupted(first, BODY)
    first.process.kill()
    first.wait()

    second = serve(*flags).ready()
    again = second.post(seeded).raise_for_status().json()
    (choice,), (expected,) = again["choices"], whole["choices"]
    assert choice == expected and choice["message"]["content"].startswith(said)
    usage = again["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == NUM_TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    stats = second.stats()
    replayed = stats["generation_checkpoints"]["replayed_tokens"]
    assert stats["generation_checkpoints"]["resumed"] == 1 and replayed >= 48
    assert stats["engine"]["generation_tokens"] == NUM_TOKENS - replayed
    assert stats["engine"]["prompt_tokens"] < usage["prompt_tokens"], "the prompt came from the SSD"

    # Its seed was drawn by the first server, and is gone on with by the second; so it is after a client hangs up.
    more = interrupted(second, BODY, num_pieces=120)
    second.idle()
    unseeded = second.post(BODY).raise_for_status().json()["choices"][0]["message"]["content"]
    assert more.startswith(drawn[: len(drawn) // 2]) and unseeded.startswith(more)
    other = second.post({**BODY, "max_tokens": NUM_TOKENS - 1}).raise_for_status().json()
    assert not unseeded.startswith(other["choices"][0]["message"]["content"][:40]), (
        "another request has its own draw"
    )
    assert second.http.post("/admin/cache/flush").json()["generation_checkpoints"]["entries"] == 0
    assert list((tmp_path / "ssd" / "checkpoints").iterdir()) == []


def test_a_stop_string_and_a_wrong_flag(serve: Callable[..., Server], tmp_path: Path) -> None:
    alone = serve("--generation-checkpoint", "16")
    assert alone.wait() == 1 and "--generation-checkpoint keeps answers in progress" in alone.log
    server = serve("--ssd-cache", str(tmp_path / "ssd"), "--generation-checkpoint", "1").ready()
    text = server.post({**BODY, "seed": 3}).json()["choices"][0]["message"]["content"]
    stopped = server.post({**BODY, "seed": 3, "stop": text[200:206]}).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    server.idle()
    flushed = server.http.post("/admin/cache/flush").json()["generation_checkpoints"]
    assert flushed["saved"] > 0 and flushed["entries"] == 0
