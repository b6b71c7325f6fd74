from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from mantou.errors import ConfigError, ModelNotFound
from mantou.models.hub import registry as registry_module
from mantou.models.hub.catalog import CATALOG, fits, strongest_fit
from mantou.models.hub.library import assess, library, local_library
from mantou.models.hub.registry import Registry
from mantou.models.hub.store import MANIFEST
from tests.unit.hub_caches import add_snapshot, model_files, weights

GB = 10**9


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def registry(tmp_path: Path, hub: Path) -> Registry:
    return Registry(tmp_path / "store", hub)


def add_converted(store: Path, name: str, repo_id: str) -> Path:
    folder = store / name
    folder.mkdir(parents=True)
    for file, data in model_files().items():
        (folder / file).write_bytes(data)
    manifest = {"repo_id": repo_id, "source": "pypi:tiny==1", "converter": 1, "created_at": 1.0}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


# ------------------------------------------------------------------ rows
def test_a_row_tells_what_the_folder_says_of_itself(registry: Registry, hub: Path) -> None:
    snapshot = add_snapshot(hub, "org/Model-4bit", "c1", model_files(), "main")
    (entry,) = registry.entries()
    assert entry.path == str(snapshot)
    assert (entry.repo_id, entry.revision, entry.source, entry.canonical) == (
        "org/Model-4bit",
        "c1",
        "hub",
        True,
    )
    assert (entry.model_type, entry.num_layers, entry.hidden_size, entry.vocab_size) == ("qwen3", 4, 128, 64)
    assert (entry.quant_bits, entry.quant_group_size, entry.quant_mode) == (4, 32, "affine")
    assert entry.param_count == 8 * 64 + 64
    assert entry.kv_bytes_per_token == 2 * 4 * 2 * 16 * 2
    assert entry.size_bytes == sum(map(len, model_files().values()))
    assert not entry.vision
    assert not entry.chat_template


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, 128),
        ({"sliding_window_pattern": 2}, 256),
        ({"full_attention_interval": 4}, 128),
        ({"kv_lora_rank": 4}, None),
        ({"hidden_size": None}, None),
    ],
)
def test_kv_counts_the_layers_that_keep_everything(
    registry: Registry, hub: Path, config: dict, kv_bytes: int | None
) -> None:
    add_snapshot(hub, "org/m", "c1", model_files(**config), "main")
    assert registry.entries()[0].kv_bytes_per_token == kv_bytes


def test_a_vision_model_nests_its_text_config(registry: Registry, hub: Path) -> None:
    config = {"vision_config": {}, "text_config": {"num_hidden_layers": 9}}
    add_snapshot(hub, "org/m", "c1", model_files(**config), "main")
    (entry,) = registry.entries()
    assert (entry.vision, entry.num_layers) == (True, 9)


def test_converted_folders_are_models_too(registry: Registry, tmp_path: Path) -> None:
    folder = add_converted(tmp_path / "store", "tiny-abc", "Tiny.Q4")
    (entry,) = registry.entries()
    assert (entry.path, entry.repo_id, entry.source) == (str(folder), "Tiny.Q4", "pypi:tiny==1")
    assert registry.resolve("pypi:tiny") == entry


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b"{}"},
        {"model.safetensors": weights()},
        {"config.json": b"{", "model.safetensors": weights()},
        {"config.json": b"[]", "model.safetensors": weights()},
        {"config.json": b"{}", "model.safetensors": weights()[:-1]},
        {"config.json": b"{}", "model.safetensors": b"\xff" * 20},
        {"config.json": b"{}", "model.safetensors": (2).to_bytes(8, "little") + b"[]"},
        {"config.json": b"{}", "model.safetensors": weights(), "model.safetensors.index.json": b"{}"},
    ],
)
def test_what_is_no_whole_model_is_not_listed(registry: Registry, hub: Path, files: dict[str, bytes]) -> None:
    add_snapshot(hub, "org/broken", "c1", files, "main")
    assert registry.entries() == []


# ------------------------------------------------------------------ revisions
def test_main_is_canonical_and_else_the_newest(registry: Registry, hub: Path) -> None:
    add_snapshot(hub, "org/m", "old", model_files(), "main", at=1)
    add_snapshot(hub, "org/m", "new", model_files(), at=2)
    assert [entry.revision for entry in registry.entries()] == ["old"]
    assert [entry.revision for entry in registry.entries(all_revisions=True)] == ["old", "new"]
    (hub / "models--org--m" / "refs" / "main").write_text("gone")
    assert [entry.revision for entry in registry.entries()] == ["new"]


def test_an_exact_repo_is_found_at_a_revision(registry: Registry, hub: Path) -> None:
    add_snapshot(hub, "org/m", "aaa1", model_files(), "main")
    add_snapshot(hub, "org/m", "bbb2", model_files())
    assert registry.find("org/m").revision == "aaa1"
    assert registry.find("org/m", "bbb").revision == "bbb2"
    assert registry.find("org/m", "main2") is None
    assert registry.find("org/other") is None


# ------------------------------------------------------------------ drift
def test_a_scan_looks_into_new_and_changed_folders_only(
    registry: Registry, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    inspect = registry_module.inspect
    monkeypatch.setattr(registry_module, "inspect", lambda path: looked.append(path.name) or inspect(path))
    add_snapshot(hub, "org/a", "c1", model_files(), "main")
    first = registry.entries()
    add_snapshot(hub, "org/b", "c2", model_files(), "main")
    assert registry.entries()[0] == first[0]
    assert looked == ["c1", "c2"]
    os.utime(hub / "models--org--a" / "snapshots" / "c1", (9, 9))
    registry.entries()
    assert looked == ["c1", "c2", "c1"]
    shutil.rmtree(hub / "models--org--a")
    assert [entry.repo_id for entry in registry.entries()] == ["org/b"]
    registry.rebuild()
    assert looked == ["c1", "c2", "c1", "c2"]


def test_a_ruined_or_older_registry_file_is_made_anew(registry: Registry, hub: Path, tmp_path: Path) -> None:
    add_snapshot(hub, "org/a", "c1", model_files(), "main")
    registry.entries()
    path = tmp_path / "store" / "registry.sqlite"
    path.write_bytes(b"this is no database" * 100)
    assert len(registry.entries()) == 1
    database = sqlite3.connect(path)
    database.execute("DROP TABLE models")
    database.execute("CREATE TABLE models (other)")
    database.execute("PRAGMA user_version = 0")
    database.close()
    assert len(registry.entries()) == 1


def test_a_registry_that_cannot_be_written_is_one_sentence(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another cache folder"):
        Registry(tmp_path / "file" / "store", hub).entries()


# ------------------------------------------------------------------ names
def test_a_part_of_a_name_must_fit_one_model(registry: Registry, hub: Path) -> None:
    for repo in ("org/Qwen3-4B", "org/Qwen3-4B-Thinking", "org/Llama"):
        add_snapshot(hub, repo, "c1", model_files(), "main")
    assert registry.resolve("llama").repo_id == "org/Llama"
    assert registry.resolve("org/qwen3-4b").repo_id == "org/Qwen3-4B"  # an equal name wins
    with pytest.raises(ModelNotFound, match=r"several models.*: org/Qwen3-4B, org/Qwen3-4B-Thinking\."):
        registry.resolve("qwen3")
    with pytest.raises(ModelNotFound, match="here are: org/Llama, "):
        registry.resolve("mistral")


def test_without_models_the_error_says_how_to_get_one(registry: Registry) -> None:
    with pytest.raises(ModelNotFound, match=r"none yet.*mantou get"):
        registry.resolve("x")


# ------------------------------------------------------------------ verdicts
def test_the_library_row_has_the_fields_of_the_route(registry: Registry, hub: Path) -> None:
    add_snapshot(hub, "org/a", "c1", model_files(), "main")
    add_snapshot(hub, "org/z", "c1", model_files(model_type="exotic"), "main")
    entries = registry.entries()
    known, unknown = library(
        entries, memory_bytes=8 * GB, tiers={"qwen3": "generic"}, serving=Path(entries[0].path)
    )
    verdict = {"fits": True, "max_safe_context": 4096, "predicted_decode_tps": None}
    assert known == {
        "repo_id": "org/a",
        "model_type": "qwen3",
        "size_bytes": entries[0].size_bytes,
        "quant_bits": 4,
        "vision": False,
        "supported": True,
        "support_tier": "generic",
        "serving": True,
        "assessment": verdict,
    }
    assert (unknown["supported"], unknown["support_tier"], unknown["assessment"]) == (False, None, None)
    assert not unknown["serving"]


def test_the_verdict_follows_from_memory(registry: Registry, hub: Path) -> None:
    add_snapshot(hub, "org/a", "c1", model_files(), "main")
    (entry,) = registry.entries()
    tight = assess(entry, int((500_000_000 + entry.size_bytes + 100 * 512) / 0.7) + 1)
    assert 99 <= (tight["max_safe_context"] or 0) <= 100
    assert assess(entry, 10_000_000) == {"fits": False, "max_safe_context": 0, "predicted_decode_tps": None}
    assert assess(entry, 8 * GB, 100e9)["predicted_decode_tps"] == 100e9 / entry.size_bytes


def test_the_strongest_model_that_fits_is_named() -> None:
    assert strongest_fit(500_000_000) is None
    assert strongest_fit(8 * GB).repo_id == "mlx-community/Qwen3-8B-4bit"
    assert (
        strongest_fit(8 * GB, max_active_bytes=3 * GB).repo_id == "mlx-community/Qwen3-4B-Instruct-2507-4bit"
    )
    assert strongest_fit(32 * GB, max_active_bytes=3 * GB).model_type == "qwen3_moe"
    assert strongest_fit(512 * GB) == CATALOG[-1]
    assert strongest_fit(512 * GB, {"llama"}).model_type == "llama"
    assert strongest_fit(512 * GB, set()) is None
    assert [entry.size_bytes for entry in CATALOG] == sorted(entry.size_bytes for entry in CATALOG)
    assert all(fits(strongest_fit(n * GB).size_bytes, n * GB) for n in range(2, 256, 7))


def test_the_local_library_knows_the_families_of_the_matrix(
    registry: Registry, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    snapshot = add_snapshot(hub, "org/a", "c1", model_files(), "main")
    add_snapshot(hub, "org/z", "c1", model_files(model_type="exotic"), "main")
    known, unknown = local_library(tmp_path / "store", serving=snapshot)
    assert (known["repo_id"], known["support_tier"], known["serving"]) == ("org/a", "targeted", True)
    assert unknown["support_tier"] is None
