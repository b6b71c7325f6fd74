"""schemathesis on /openapi.json: whatever it makes of the document, no 5xx, no hang, and every answer as declared.

`MANTOU_FUZZ=8 pytest tests/api/test_schemathesis.py` is the long run: eight workers, while eight streams run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.api.conftest import Running
from tests.real import ROOT

CHAT = "/v1/chat/completions"
REPLY = "Hello, wörld! 👋 How are you?"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
# tests.api.fuzz_checks has the same check, and the reasons for which a body that fits its schema may be refused.
EXCLUDED = "positive_data_acceptance"
ENVIRONMENT = {
    **os.environ,
    "SCHEMATHESIS_HOOKS": "tests.api.fuzz_checks",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}
# Runs are processes of one worker each: threads of one run trip over a fault of CPython 3.11's parser.
NUM_RUNS = int(os.environ.get("MANTOU_FUZZ", "1"))
LONG = NUM_RUNS > 1
NUM_STREAMS = 8 if LONG else 1


@contextmanager
def streams(server: Running) -> Iterator[list[str]]:
    """Streams that run all the while; yields what they said."""
    over = threading.Event()
    said: list[str] = []

    def ask() -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as http:
            while not over.is_set():
                answer = http.post(CHAT, json=ASK)
                assert answer.status_code in (200, 429), answer.text
                if answer.status_code == 200:
                    said.append(text_of(answer.text))

    threads = [threading.Thread(target=ask) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield said
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a stream hangs"


def fuzz(server: Running, number: int, folder: Path) -> str | None:
    """One run; what it found."""
    folder.mkdir()
    effort = ("--max-examples", "100") if LONG else ("--max-examples", "1", "--max-time", "8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", "all", "--exclude-checks", EXCLUDED),
            *("--phases", "examples,coverage,fuzzing", "--request-timeout", "30", "--seed", str(number)),
            *("--suppress-health-check", "all", "--no-color", "--no-shrink", "--generation-database", "none"),
            *effort,
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,  # it leaves files behind
        env=ENVIRONMENT,
        timeout=3600,
    )
    return None if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"[-6000:]


def test_no_input_breaks_the_server_or_its_promises(serving: Any, tmp_path: Path) -> None:
    runs = range(1, NUM_RUNS + 1)
    with serving(max_waiting=256) as running, streams(running) as said, ThreadPoolExecutor(NUM_RUNS) as pool:
        found = list(pool.map(lambda number: fuzz(running, number, tmp_path / str(number)), runs))
    assert found == [None] * NUM_RUNS, "\n".join(filter(None, found))
    assert set(said) == {REPLY}, "a neighbour's stream changed"


def text_of(stream: str) -> str:
    """What a stream of chat chunks says."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
