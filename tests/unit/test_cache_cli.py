from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mantou.cache.ssd import SsdStore
from mantou.cli.cache import app
from mantou.errors import ConfigError
from tests.unit.cache_rows import KEY, OTHER, Row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = SsdStore(tmp_path, 1 << 30)
    for key, length in ((KEY, 700), (OTHER, 300)):
        tokens = [random.Random(length).randrange(1000) for _ in range(length)]
        store.put(key, tokens, Row(tokens, key))
    store.close()
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def blocks(folder: Path) -> list[Path]:
    return sorted((folder / "blocks").iterdir())


def test_ls_shows_each_key(folder: Path) -> None:
    output = run("ls", folder).output
    assert "adapter@1" in output and "700" in output and "300" in output
    assert output.count("model") == 3  # the title and two keys


def test_ls_works_beside_a_server(folder: Path) -> None:
    store = SsdStore(folder, 1 << 30)
    store.put(KEY, [5] * 100, Row([5] * 100))
    store.flush(10)
    assert " 4 " in run("ls", folder).output
    refused = run("gc", folder)
    assert isinstance(refused.exception, ConfigError) and "Another process" in str(refused.exception)
    store.close()


def test_ls_of_another_folder_says_so(tmp_path: Path) -> None:
    assert isinstance(run("ls", tmp_path).exception, ConfigError)


def test_gc_removes_leftovers_and_what_is_too_much(folder: Path) -> None:
    left = folder / "blocks" / f"{'0' * 64}.state.safetensors.tmp"
    left.write_text("half")
    assert run("gc", folder).exit_code == 0
    assert not left.exists() and len(blocks(folder)) == 5
    assert "0.0 MB kept" in run("gc", folder, "--max-size", "9KB").output
    assert 0 < sum(path.stat().st_size for path in blocks(folder)) <= 9000


def test_verify_finds_one_changed_bit_and_removes_the_file_if_told(folder: Path) -> None:
    assert run("verify", folder).output == "5 of 5 files are good.\n"
    bad = blocks(folder)[2]
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    result = run("verify", folder)
    assert result.exit_code == 1 and bad.name in result.output and bad.exists()
    assert run("verify", folder, "--fix").exit_code == 0 and not bad.exists()
    assert run("verify", folder).exit_code == 0
