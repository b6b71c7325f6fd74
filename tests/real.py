"""Real models and real server processes for the tests. Knows no routes beyond those that say how the server is."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import tokenizers
from mlx.utils import tree_flatten
from tokenizers import decoders, models, pre_tokenizers, trainers

from mantou.config import STARTER
from mantou.models.hub import obtain
from mantou.models.load import build
from mantou.progress import ProgressBoard

ROOT = Path(__file__).resolve().parent.parent
# How long a shared machine may take for what is quick on a free one. Only a broken server ever waits so long.
DEADLINE_S = 120.0
TINY_CONTEXT = 2048
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_CORPUS = (
    "the quick brown fox jumps over the lazy dog while the other foxes and dogs look on",
    "user assistant system there here where what when naïve café smile 😀😃",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": TINY_CONTEXT,
    "tie_word_embeddings": False,
}


# ------------------------------------------------------------------ models
@cache
def starter_folder() -> Path:
    """The starter model of `mantou serve`, fetched and converted if this machine does not have it yet."""
    return obtain(STARTER, revision=None, cache_dir=None, board=ProgressBoard())


def tiny_folder(folder: Path, **config: Any) -> Path:
    """Writes a llama with random weights and a small real tokenizer; it says varied nonsense, and quickly.

    Tokens are bytes and pieces of words, so characters and stop strings lie across tokens. It never says a special
    token, so an answer always runs to its `max_tokens`.
    """
    folder.mkdir()
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {**_TINY, "vocab_size": tokenizer.get_vocab_size(), **config}
    settings = {"bos_token": _SPECIALS[0], "eos_token": _SPECIALS[2], "chat_template": _TEMPLATE}
    for name, content in (("config", whole), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), _weights({**whole, "model_type": "llama"}))
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(_SPECIALS),
        show_progress=False,
    )
    made.train_from_iterator(_CORPUS, trainer)
    return made


def _weights(config: Mapping[str, Any]) -> dict[str, mx.array]:
    named = tree_flatten(build("llama", config).parameters())
    keys = mx.random.split(mx.random.key(3), len(named))
    weights = {
        name: mx.random.normal(value.shape, key=key) * (2.0 / value.shape[-1] ** 0.5)
        if value.ndim == 2
        else mx.ones(value.shape)
        for (name, value), key in zip(named, keys, strict=True)
    }
    head = weights["lm_head.weight"]  # a row of zeros is a logit of 0, far below the best of the others
    ordinary = mx.arange(head.shape[0]) >= len(_SPECIALS)
    return {**weights, "lm_head.weight": head * ordinary[:, None]}


# ------------------------------------------------------------------ waiting
def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`. Raises AssertionError with `what` after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not true: {what}"
        time.sleep(0.01)  # leaves the processor to the server that is waited for
    return value


# ------------------------------------------------------------------ processes
def environment(home: Path, **changes: str) -> dict[str, str]:
    """An environment whose model caches are empty folders below `home`, and that finds this source tree."""
    caches = {"HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home)}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MANTOU_CACHE"))}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**inherited, **caches, "PYTHONPATH": path, "COLUMNS": "200", **changes}


def mantou(
    *arguments: str | Path, env: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a verb to its end."""
    command = [sys.executable, "-m", "mantou", *map(str, arguments)]
    return subprocess.run(
        command,
        check=False,
        input=stdin,
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """A server process. Its output, both streams, goes to `output`."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path
    http: httpx2.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def answering(self) -> Server:
        """Waits until the socket answers; the model may still be loading."""

        def answers() -> bool:
            assert self.process.poll() is None, self.log
            with suppress(httpx2.ConnectError):
                return self.http.get("/health").status_code == 200
            return False

        eventually(answers, "the server answers")
        return self

    def ready(self) -> Server:
        """Waits until the model is loaded."""
        self.answering()
        answer = self.http.get("/v1/models")  # waits for the model
        assert answer.status_code == 200, f"{answer.text}\n{self.log}"
        return self

    def stats(self) -> dict[str, Any]:
        return self.http.get("/stats").raise_for_status().json()

    def idle(self) -> dict[str, Any]:
        """Waits until no row runs, waits or holds memory; returns GET /stats. This is what a leak never reaches."""

        def empty() -> dict[str, Any] | None:
            stats = self.stats()
            engine = stats["engine"]
            held = (engine["running"], engine["waiting"], engine["kv"]["bytes"], engine["kv"]["tokens"])
            return None if any(held) else stats

        return eventually(empty, "no row runs, waits or holds memory")

    def rows(self, *, running: int, waiting: int = 0) -> dict[str, Any]:
        """Waits until exactly so many rows run and wait; returns GET /stats."""

        def reached() -> dict[str, Any] | None:
            stats = self.stats()
            engine = stats["engine"]
            return stats if (engine["running"], engine["waiting"]) == (running, waiting) else None

        return eventually(reached, f"{running} rows run and {waiting} wait")

    def post(self, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> httpx2.Response:
        return self.http.post(path, json=body)

    def say(self, line: str) -> None:
        """Writes a line to the process's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status")
        if status.exists():
            return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) * 1024
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024

    def wait(self) -> int:
        """The exit status, once the process has ended by itself."""
        return self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        """Ends the process and whatever it started, however it is."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextmanager
def serving(
    home: Path,
    *arguments: str | Path,
    module: Sequence[str] = ("mantou", "serve"),
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`python -m mantou serve ARGUMENTS` on a free port until the block ends. `home` takes its files."""
    home.mkdir(exist_ok=True)
    port = free_port()
    output = home / f"server-{port}.log"
    command = [sys.executable, "-m", *module, *map(str, arguments), "--port", str(port)]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=env or environment(home),
            cwd=ROOT,
            start_new_session=True,
        )
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
        server = Server(process, port, output, http)
        try:
            yield server
        finally:
            server.stop()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, without its end mark."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
