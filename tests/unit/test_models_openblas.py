"""OpenBLAS under plain MLX: only where the kernels are missing, only before MLX, and said on the ready card."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mantou.models.ops import cpu, openblas
from mantou.models.ops.plain import PlainOps

OFF = {"MANTOU_CPU_KERNELS": "0"}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with an OpenBLAS, in a process that has not imported MLX; the list says what was loaded."""
    names: list[str] = []
    monkeypatch.setattr(openblas, "_in_force", [])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(openblas.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    monkeypatch.setattr(openblas.ctypes, "CDLL", lambda name, mode: names.append(name))
    return names


def test_it_is_loaded_once_where_the_kernels_are_off(loaded: list[str]) -> None:
    assert openblas.preload_openblas(OFF) == "libopenblas.so.0"
    assert openblas.preload_openblas(OFF) == "libopenblas.so.0"
    assert loaded == ["libopenblas.so.0"] and openblas.in_force() == "libopenblas.so.0"


def test_it_is_left_alone_where_it_would_not_help(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert openblas.preload_openblas({**OFF, "MANTOU_OPENBLAS": "0"}) is None
    monkeypatch.setattr(openblas, "kernels_expected", lambda environ: True)
    assert openblas.preload_openblas({}) is None
    monkeypatch.setattr(openblas, "kernels_expected", lambda environ: False)
    monkeypatch.setitem(sys.modules, "mlx.core", SimpleNamespace())
    assert openblas.preload_openblas({}) is None
    assert not loaded and openblas.in_force() is None


def test_a_library_that_does_not_load_is_none(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr(openblas.ctypes, "CDLL", broken)
    assert openblas.preload_openblas(OFF) is None


@pytest.mark.parametrize(("release", "expected"), [("0.32.4", True), ("0.1.0", False)])
def test_kernels_of_another_release_are_not_expected(
    release: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_built_for.py").write_text(f'MLX = "{release}"\n')
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(openblas.importlib.metadata, "version", lambda name: "0.32.4")
    assert openblas.kernels_expected({}) is expected
    assert openblas.kernels_expected(OFF) is False
    (tmp_path / "_built_for.py").unlink()
    assert openblas.kernels_expected({}) is False


def test_the_ready_card_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "_in_force", ["libopenblas.so.0"])
    ops = cpu.cpu_ops(environ=OFF)
    assert isinstance(ops, PlainOps)
    assert "OpenBLAS (libopenblas.so.0)" in ops.install(None)[0]


def test_nothing_imports_mlx_before_a_server_asks_for_it() -> None:
    """Else OpenBLAS would come too late in a real server."""
    source = (
        "import sys, mantou.cli.serve, mantou.api.server, mantou.build;"
        "import mantou.models.ops.openblas;"
        "sys.exit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
