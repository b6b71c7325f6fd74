"""With the kernels on, a row's tokens still depend on nothing but its own request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FAMILIES = ("llama", "qwen3", "gemma3_text", "gemma4_text", "qwen3_5", "mamba2", "qwen3_moe", "gpt_oss")


# In two processes, so that neither of two workers waits for the other at the end.
@pytest.mark.parametrize("families", [FAMILIES[::2], FAMILIES[1::2]], ids="-".join)
def test_tokens_do_not_depend_on_neighbours_drafts_chunks_or_cache_hits_with_the_kernels_on(
    families: Sequence[str],
) -> None:
    command = [sys.executable, "-m", "tests.kernels.compose_run", *families]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert found.stdout.rstrip().endswith(" 0 differences")
    assert "fused layers" in found.stdout, "no layer was fused, so nothing was proved"
