"""Starts, watches and stops a server process. Knows command lines and /proc; no requests beyond /health."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import client

START_LIMIT_S = 300.0
STOP_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class System:
    """A server under test. `{model}` and `{port}` in the command are filled in at the start."""

    name: str
    command: Sequence[str]


def systems(mantou_args: Sequence[str]) -> dict[str, System]:
    """Both servers with their defaults, but for mantou's extra flags and the logs of mlx_lm.server."""
    mantou = ["-m", "mantou", "serve", "{model}", "--port", "{port}", *mantou_args]
    peer = ["-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}", "--log-level", "WARNING"]
    return {
        "mantou": System("mantou", [sys.executable, *mantou]),
        "mlx_lm.server": System("mlx_lm.server", [sys.executable, *peer]),
    }


@dataclass(slots=True)
class Server:
    """A running server. `started` is the time.perf_counter of the fork."""

    system: System
    port: int
    started: float
    process: subprocess.Popen[bytes]
    log: Path
    _peak_bytes: int = field(default=0)

    async def ready(self) -> float:
        """Seconds from the start to the first 200 of /health. Raises RuntimeError with the log if it died."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if await client.get_status(self.port, "/health") == 200:
                    return time.perf_counter() - self.started
            self.check_alive()
            await asyncio.sleep(0.01)

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(
                f"{self.system.name} ended with {self.process.returncode}:\n{self.log.read_text()}"
            )
        if time.perf_counter() - self.started > START_LIMIT_S:
            raise RuntimeError(f"{self.system.name} did not answer within {START_LIMIT_S:.0f} s.")

    def rss_bytes(self) -> int:
        """Resident memory of the process now."""
        rss, peak = _memory_bytes(self.process.pid)
        self._peak_bytes = max(self._peak_bytes, rss, peak)
        return rss

    def peak_rss_bytes(self) -> int:
        """The most resident memory so far: the kernel's mark on Linux, the most of the looks taken on macOS."""
        self.rss_bytes()
        return self._peak_bytes


def _memory_bytes(pid: int) -> tuple[int, int]:
    """(resident now, resident at most). The second is 0 where the system keeps no mark."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", status.read_text(), re.MULTILINE))
        return int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(shown.stdout) * 1024, 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((client.HOST, 0))
        return int(listener.getsockname()[1])


@contextlib.asynccontextmanager
async def running(system: System, model: Path) -> AsyncIterator[Server]:
    """The server as a child in its own process group; the whole group is gone afterwards."""
    port = free_port()
    command = [part.format(model=model, port=port) for part in system.command]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        started = time.perf_counter()
        process = _spawn(command, log)
        try:
            yield Server(system, port, started, process, log)
        finally:
            _stop(process)


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S if number == signal.SIGINT else 5.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it left behind
