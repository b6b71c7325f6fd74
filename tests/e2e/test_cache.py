"""Servers with a prompt cache on disk: killed while they write, restarted, two on one folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.real import Server

PROMPTS = 6


def body(number: int) -> dict[str, Any]:
    """A prompt of a few hundred tokens that shares half of them with its neighbour."""
    dice, shared = random.Random(number), random.Random(number // 2)
    tokens = [shared.randrange(3, 200) for _ in range(300)] + [dice.randrange(3, 200) for _ in range(200)]
    return {"prompt": tokens, "max_tokens": 12, "temperature": 0, "session_id": f"s{number}"}


def ask(server: Server, number: int) -> tuple[str, int]:
    """The answer, and how much of the prompt was not computed."""
    reply = server.post(body(number), "/v1/completions").raise_for_status().json()
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_servers_that_are_killed_while_they_write_leave_nothing_wrong(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    cold = serve("--prompt-cache", "0").ready()
    expected = [ask(cold, number)[0] for number in range(PROMPTS)]
    cold.stop()
    reused = 0
    for life in range(3):
        server = serve("--ssd-cache", str(tmp_path / "ssd")).ready()
        for number in range(2 * life + 2):
            text, cached = ask(server, number)
            assert text == expected[number]
            reused += cached
        if life == 0:
            assert server.post({}, "/admin/cache/flush").json()["flushed"] is True
        stats = server.stats()["ssd_cache"]
        assert stats["corrupt_files"] == 0 and (life == 0 or stats["restores"] > 0)
        server.process.kill()  # whatever it was writing
        server.wait()
    assert reused > 1000, "the second life goes on from the first"


def test_a_second_server_on_a_folder_says_why_it_ends(serve: Callable[..., Server], tmp_path: Path) -> None:
    first = serve("--ssd-cache", str(tmp_path / "ssd")).ready()
    text, _ = ask(first, 0)
    second = serve("--ssd-cache", str(tmp_path / "ssd"))
    assert second.wait() == 1
    assert f"Another process (pid {first.process.pid}) uses the SSD cache" in second.log
    assert "Traceback" not in second.log
    assert ask(first, 0)[0] == text and first.stats()["ssd_cache"]["corrupt_files"] == 0
    first.stop()
    third = serve("--ssd-cache", str(tmp_path / "ssd")).ready()
    again, cached = ask(third, 0)
    assert (again, cached) == (text, 499)
    check_metrics(third)


def check_metrics(server: Server) -> None:
    """What the cache of the last server did is what Prometheus is told."""
    text = server.http.get("/metrics").raise_for_status().text
    found = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if "{model_name" in line
    }
    assert found["vllm:prefix_cache_queries_total"] == 500 and found["vllm:prefix_cache_hits_total"] == 499
    assert found["mantou_ssd_cache_restores_total"] == 1 and found["mantou_prompt_cache_sessions"] == 1
    assert found["mantou_step_seconds_median"] > 0 and found["mantou_ssd_cache_failed_spills_total"] == 0
