from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mantou.models import device


def test_this_machine_has_a_name_and_memory() -> None:
    found = device.this_device()
    assert found.kind in ("cpu", "metal", "cuda")
    assert found.on_cpu == (found.kind == "cpu")
    assert found.name
    assert found.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"/sys/fs/cgroup/memory.max": "1073741824\n"}, 1 << 30),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912"}, 1 << 29),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_bounds_the_memory(
    files: dict[str, str], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path, *_: Any, **__: Any) -> str:
        if str(path) in files:
            return files[str(path)]
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(device.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert device.machine_memory_bytes() == min(1 << 32, limit or 1 << 32)
