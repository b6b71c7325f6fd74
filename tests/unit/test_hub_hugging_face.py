from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mantou.errors import DownloadError, MantouError, ModelError, ModelNotFound
from mantou.models.hub import hub_cache_dir, obtain
from mantou.progress import ProgressBoard

SHA = "a" * 40
WEIGHTS = (2).to_bytes(8, "little") + b"{}"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "modeling.py": b"1/0",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# read me",
    "consolidated.safetensors": b"the weights again",
    "onnx/config.json": b"{}",
}


class FakeHub(ThreadingHTTPServer):
    """The few answers of the hub that a snapshot needs: one repo, org/good, or one status for everything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = dict(FILES)
        self.status = 200
        self.code = ""
        self.served: list[str] = []
        self.ranges: list[str] = []
        self.cut_after: int | None = None  # bytes of a body after which the connection drops


class Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: object) -> None:
        return None

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        hub = self.server
        if hub.status != 200:
            self._send(hub.status, b"{}", {"X-Error-Code": hub.code} if hub.code else {}, with_body)
        elif path.startswith("/api/models/org/good/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in hub.files.items()
            ]
            self._send(200, json.dumps(tree).encode(), {}, with_body)
        elif path.startswith("/api/models/org/good"):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {
                "id": "org/good",
                "sha": SHA,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            self._send(200, json.dumps(info).encode(), {}, with_body)
        elif path.startswith(f"/org/good/resolve/{SHA}/"):
            name = path.removeprefix(f"/org/good/resolve/{SHA}/")
            hub.served.append(name)
            self._send_file(hub.files[name], with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _send_file(self, data: bytes, with_body: bool) -> None:
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None or not with_body:
            return self._send(200, data, headers, with_body)
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").split("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self._send(206, data[start:], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body if self.server.cut_after is None else body[: self.server.cut_after])


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def get(spec: str, tmp_path: Path, board: ProgressBoard | None = None, *, refresh: bool = False) -> Path:
    board = board or ProgressBoard()
    return obtain(spec, revision=None, cache_dir=tmp_path / "cache", board=board, refresh=refresh)


def test_a_snapshot_has_data_files_only_and_tells_its_progress(hub: FakeHub, tmp_path: Path) -> None:
    board = ProgressBoard()
    folder = get("org/good", tmp_path, board)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert not {"modeling.py", "pytorch_model.bin"} & set(hub.served)
    (row,) = board.snapshot()
    assert (row["repo_id"], row["state"], row["stage"]) == ("org/good", "done", "download")
    assert row["files_done"] == row["files_total"] == 4
    assert row["received_bytes"] == row["total_bytes"] == sum(len(FILES[name]) for name in names)


def test_an_embedding_model_comes_with_how_it_pools(hub: FakeHub, tmp_path: Path) -> None:
    hub.files |= {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/pytorch_model.bin": b"pickle",
    }
    folder = get("org/good", tmp_path)
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert not {"2_Dense/pytorch_model.bin", "onnx/config.json"} & set(hub.served)


def test_a_repo_that_is_here_needs_no_network(hub: FakeHub, tmp_path: Path) -> None:
    folder = get("org/good", tmp_path)
    hub.status = 500
    assert get("org/good", tmp_path) == folder
    assert get("good", tmp_path) == folder


@pytest.fixture
def drops(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub whose connections break after 60,000 bytes of a body."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.files["model.safetensors"] = WEIGHTS + bytes(100_000)
    hub.cut_after = 60_000
    return hub


def test_a_download_goes_on_where_it_stopped(
    drops: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    folder = get("org/good", tmp_path)
    assert (folder / "model.safetensors").stat().st_size == len(WEIGHTS) + 100_000
    assert drops.ranges == ["bytes=60000-"]


def test_a_connection_that_keeps_breaking_is_one_sentence(drops: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="goes on where it stopped"):
        get("org/good", tmp_path)


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (401, "RepoNotFound", ModelNotFound, "no repo org/good, or it is private"),
        (404, "RepoNotFound", ModelNotFound, "no repo org/good, or it is private"),
        (404, "RevisionNotFound", ModelNotFound, "no revision"),
        (403, "GatedRepo", DownloadError, "accept its terms"),
        (401, "GatedRepo", DownloadError, "accept its terms"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: FakeHub, tmp_path: Path, status: int, code: str, kind: type[MantouError], message: str
) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(kind, match=message):
        get("org/good", tmp_path)


def test_no_network_is_one_sentence(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached"):
        get("org/good", tmp_path)


def test_a_repo_without_safetensors_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        get("org/good", tmp_path)


def test_a_revision_of_a_part_of_a_name_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="full repo id"):
        obtain("good", revision="main", cache_dir=tmp_path / "cache", board=ProgressBoard())


def test_the_cache_is_the_one_of_huggingface_hub(hub: FakeHub, tmp_path: Path) -> None:
    assert hub_cache_dir() == tmp_path / "hub"
