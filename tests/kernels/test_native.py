"""The inner loops without MLX: AMX with its instructions emulated, and NEON under qemu where the tools are.

Both programs compare with plain loops, bit for bit where integers are multiplied. `make neon` runs the second alone.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "native_kernels.sh"
X86 = platform.machine() in ("x86_64", "AMD64")


def built_and_run(what: str, folder: Path) -> str:
    done = subprocess.run([SCRIPT, what, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not X86, reason="the emulation is written with AVX2")
def test_amx_tiles_give_the_products_of_plain_loops(tmp_path: Path) -> None:
    assert ", 0 wrong" in built_and_run("emulated", tmp_path)


def test_without_the_tools_a_line_says_that_neon_was_not_run(tmp_path: Path) -> None:
    """Compiling for NEON takes half a minute, so `make neon` does that."""
    done = subprocess.run(
        [SCRIPT, "neon", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/nowhere:/usr/bin:/bin", "NEON_CXX": "no-such-compiler"},
    )
    assert done.returncode == 3
    assert "NEON kernels not run: no-such-compiler is missing" in done.stdout
