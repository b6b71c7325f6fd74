"""What this machine is: device, memory. Knows no models."""

from __future__ import annotations

import gc
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Device:
    """Where MLX computes. `memory_bytes` is the device's own memory, or the machine's where they share it."""

    name: str
    kind: str  # cpu | metal | cuda
    memory_bytes: int

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"


def _cgroup_limit() -> int | None:
    """Memory limit of the container, if there is one (cgroup v2, then v1)."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def machine_memory_bytes() -> int:
    """Physical memory, or the container's limit where that is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    return min(physical, limit) if limit else physical


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def this_device() -> Device:
    """The default device of MLX on this machine."""
    if mx.default_device() == mx.cpu:
        return Device(f"CPU ({_cpu_name()})", "cpu", machine_memory_bytes())
    info = mx.device_info()
    kind = "metal" if mx.metal.is_available() else "cuda"
    name = str(info.get("device_name", kind))
    return Device(name, kind, int(info.get("memory_size", machine_memory_bytes())))


def limit_memory(num_bytes: int) -> None:
    """Makes MLX give back cached buffers before it takes more than this from the device."""
    mx.set_memory_limit(num_bytes)


def release_thread() -> None:
    """Gives up the calling thread's MLX streams and cached buffers. To be called last on a thread that used MLX: one
    that ends with streams of its own lets the interpreter abort at exit (seen on the CPU and on CUDA, mlx 0.32.4)."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()
