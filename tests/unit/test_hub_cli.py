from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from mantou.cli.gc import gc
from mantou.cli.get import get
from mantou.cli.ls import ls, parse_size
from mantou.cli.scan import scan
from mantou.errors import ConfigError, ModelNotFound
from tests.unit import gguf_files as files
from tests.unit.hub_caches import add_snapshot, model_files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("mantou.models.hub.store.default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("mantou.models.hub.default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("mantou.models.hub.sources.default_cache_dir", lambda: tmp_path / "cache")
    add_snapshot(folder, "org/text", "old-commit", model_files())
    add_snapshot(folder, "org/text", "new-commit", model_files(), "main")
    add_snapshot(folder, "org/eyes", "c1", model_files(vision_config={}), "main")
    return folder


def run(*words: str) -> Result:
    app = typer.Typer()
    for verb in (get, ls, scan, gc):
        app.command()(verb)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_ls_shows_a_row_a_repo(hub: Path) -> None:
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == ["model", "type", "parameters", "bits", "size", "context", "fits"]
    assert [line.split()[0] for line in lines[1:]] == ["org/eyes", "org/text"]


def test_ls_narrows(hub: Path) -> None:
    assert "org/text" not in run("ls", "--vision").stdout
    assert "org/eyes" not in run("ls", "TEX").stdout
    assert "org/text" in run("ls", "--max-size", "1MB").stdout
    nothing = run("ls", "--max-size", "1KB")
    assert nothing.exit_code == 0
    assert "mantou get" in nothing.stderr


def test_ls_marks_the_canonical_revision(hub: Path) -> None:
    lines = run("ls", "text", "--all-revisions").stdout.splitlines()
    assert lines[1].split()[-2:] == ["new-commit", "*"]
    assert lines[2].split()[-1] == "old-commit"


def test_scan_counts(hub: Path) -> None:
    assert run("scan").stdout.startswith("2 models in 3 revisions.")


def test_gc_is_dry_without_yes(hub: Path) -> None:
    old = hub / "models--org--text" / "snapshots" / "old-commit"
    assert "can be freed" in run("gc").stdout
    assert "can be freed" in run("gc", "--yes", "--dry-run").stdout
    assert old.exists()
    assert "freed." in run("gc", "--yes").stdout
    assert not old.exists()
    assert "Nothing to delete." in run("gc", "--yes").stdout


def test_get_converts_prints_the_folder_and_tells_each_stage(hub: Path, tmp_path: Path) -> None:
    path = files.tiny_model().write(tmp_path / "tiny.gguf")
    result = run("get", str(path))
    assert result.exit_code == 0
    assert (Path(result.stdout.strip()) / "model.safetensors").is_file()
    assert "convert tiny.gguf" in result.stderr


def test_get_raises_what_the_entry_point_prints(hub: Path) -> None:
    assert isinstance(run("get", "no-such-model").exception, ModelNotFound)


@pytest.mark.parametrize(("text", "size"), [("8GB", 8e9), ("500 mb", 5e8), ("1.5", 1.5e9), ("10B", 10)])
def test_sizes_are_read(text: str, size: float) -> None:
    assert parse_size(text) == size


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="8GB"):
        parse_size("big")
