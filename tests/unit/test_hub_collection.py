from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

from mantou.models.hub.collection import Plan, collect, plan
from mantou.models.hub.store import LOCKS, MANIFEST, PARTIAL
from tests.unit.hub_caches import add_snapshot


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def look(hub: Path, store: Path, *, force: bool = False) -> Plan:
    return plan(hub, store, converter=2, force=force)


def paths(planned: Plan) -> set[str]:
    return {item.path.name for item in planned.garbage}


def test_snapshots_with_a_ref_stay_and_others_go_with_their_blobs(hub: Path, store: Path) -> None:
    old = add_snapshot(hub, "org/m", "old", {"config.json": b"old", "same.json": b"same"})
    main = add_snapshot(hub, "org/m", "new", {"config.json": b"new", "same.json": b"same"}, "main")
    tagged = add_snapshot(hub, "org/m", "tag", {"config.json": b"tagged"}, "v1")
    planned = look(hub, store)
    assert [item.path for item in planned.garbage] == [old, (old / "config.json").resolve()]
    assert planned.size_bytes == len(b"old")
    assert collect(planned) == 3
    assert not old.exists()
    assert (main / "same.json").read_bytes() == b"same"
    assert (tagged / "config.json").read_bytes() == b"tagged"
    assert look(hub, store) == Plan((), ())


def test_a_snapshot_with_more_files_is_spared_unless_forced(hub: Path, store: Path) -> None:
    add_snapshot(hub, "org/m", "old", {"config.json": b"old", "adapter.safetensors": b"mine"})
    add_snapshot(hub, "org/m", "new", {"config.json": b"new"}, "main")
    planned = look(hub, store)
    assert planned.garbage == ()
    assert len(planned.spared) == 1
    assert "adapter.safetensors" in planned.spared[0]
    assert "old" in paths(look(hub, store, force=True))
    assert len(look(hub, store, force=True).garbage) == 3


def test_a_repo_without_a_usable_ref_is_not_touched(hub: Path, store: Path) -> None:
    add_snapshot(hub, "org/m", "one", {"config.json": b"1"})
    add_snapshot(hub, "org/n", "two", {"config.json": b"2"})
    refs = hub / "models--org--n" / "refs"
    refs.mkdir()
    (refs / "main").write_text("not-here")
    assert look(hub, store, force=True) == Plan((), ())


def test_unfinished_downloads_and_locks_are_never_touched(hub: Path, store: Path) -> None:
    add_snapshot(hub, "org/m", "new", {"config.json": b"new"}, "main")
    blobs = hub / "models--org--m" / "blobs"
    (blobs / "stray").write_bytes(b"finished, link not made yet")
    (blobs / "half.incomplete").write_bytes(b"half")
    (hub / ".locks" / "models--org--m").mkdir(parents=True)
    assert look(hub, store, force=True) == Plan((), ())
    (blobs / "half.incomplete").unlink()
    assert paths(look(hub, store)) == {"stray"}


def test_data_sets_and_spaces_are_not_models(hub: Path, store: Path) -> None:
    (hub / "datasets--org--d" / "blobs").mkdir(parents=True)
    (hub / "datasets--org--d" / "blobs" / "x").write_bytes(b"x")
    assert look(hub, store) == Plan((), ())


def converted(store: Path, name: str, converter: int) -> Path:
    folder = store / name
    folder.mkdir()
    manifest = {"repo_id": name, "source": "x", "converter": converter, "created_at": 0.0}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_folders_of_an_older_converter_go(hub: Path, store: Path) -> None:
    converted(store, "old", 1)
    converted(store, "current", 2)
    (store / "not-ours").mkdir()
    (store / "registry.sqlite").write_bytes(b"")
    assert paths(look(hub, store)) == {"old"}
    collect(look(hub, store))
    assert sorted(path.name for path in store.iterdir()) == ["current", "not-ours", "registry.sqlite"]


def test_a_partial_folder_goes_when_nobody_holds_its_lock(hub: Path, store: Path) -> None:
    (store / f"{PARTIAL}m").mkdir()
    (store / LOCKS).mkdir()
    with FileLock(store / LOCKS / "m.lock"):
        assert look(hub, store) == Plan((), ())
    assert paths(look(hub, store)) == {f"{PARTIAL}m"}
