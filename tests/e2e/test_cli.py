"""The command line as a process: a bad input is one sentence on stderr and a status that is not 0; nothing is left."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mantou import __version__, load
from tests.e2e.conftest import CONTEXT
from tests.real import environment, free_port, mantou
from tests.unit.gguf_files import tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """Runs a verb with empty caches. No hub can be reached."""
    env = environment(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")

    def run_verb(*arguments: str | Path, stdin: str = "") -> CompletedProcess[str]:
        return mantou(*arguments, env=env, stdin=stdin)

    return run_verb


def sentence(done: CompletedProcess[str]) -> str:
    """The sentence that a failed verb said, after it was checked that it said nothing else."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    *progress, last = done.stderr.splitlines()
    assert all(line.endswith(" ...") for line in progress), done.stderr
    assert last.startswith("mantou: ")
    assert last.endswith(".")
    return last


# ------------------------------------------------------------------ models that cannot be loaded
def _changed(tiny: Path, folder: Path, **config: object) -> Path:
    shutil.copytree(tiny, folder)
    whole = {**json.loads((folder / "config.json").read_text("utf-8")), **config}
    (folder / "config.json").write_text(json.dumps(whole), "utf-8")
    return folder


def _truncated(tiny: Path, folder: Path) -> Path:
    _changed(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def _written(tiny: Path, folder: Path, name: str, text: str) -> Path:
    _changed(tiny, folder)
    (folder / name).write_text(text, "utf-8")
    return folder


def _gguf(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


BAD_MODELS: dict[str, tuple[Callable[[Path, Path], str | Path], str]] = {
    "no folder": (lambda tiny, at: "./there/is/none", "./there/is/none does not exist"),
    "unknown name": (lambda tiny, at: "no-such-model", "No local model is called 'no-such-model'"),
    "no network": (lambda tiny, at: "org/name", "cannot be reached and org/name is not on this machine"),
    "no such package": (lambda tiny, at: "pypi:../etc", "names no package"),
    "empty folder": (lambda tiny, at: at.mkdir() or at, "has no config.json"),
    "broken config": (lambda tiny, at: _written(tiny, at, "config.json", "{"), "config.json cannot be read"),
    "broken tokenizer": (
        lambda tiny, at: _written(tiny, at, "tokenizer.json", "{}"),
        "tokenizer.json cannot be loaded",
    ),
    "truncated weights": (_truncated, "download the model again"),
    "weights of another shape": (lambda tiny, at: _changed(tiny, at, hidden_size=64), "do not fit"),
    "remote code": (
        lambda tiny, at: _changed(tiny, at, model_file="evil.py"),
        r"wants to run its own code \(evil.py\)",
    ),
    "unsupported family": (lambda tiny, at: _changed(tiny, at, model_type="unheard_of"), "unheard_of"),
    "truncated GGUF": (
        lambda tiny, at: _gguf(at.with_suffix(".gguf"), tiny_model().to_bytes()[:3000]),
        "corrupt or cut off",
    ),
    "GGUF without its last tensor": (
        lambda tiny, at: _gguf(at.with_suffix(".gguf"), tiny_model().to_bytes()[:-64]),
        "corrupt or cut off",
    ),
    "no GGUF": (lambda tiny, at: _gguf(at.with_suffix(".gguf"), b"GGUF" + b"\xff" * 100), "GGUF version"),
}


# Both verbs take the same way to a loaded model; these cases cover its stages for the second one.
ALSO_GENERATED = ("no network", "broken config", "truncated weights", "truncated GGUF")


@pytest.mark.parametrize(
    ("verb", "case"),
    [*(("serve", case) for case in BAD_MODELS), *(("generate", case) for case in ALSO_GENERATED)],
)
def test_bad_models(
    run: Callable[..., CompletedProcess[str]], tiny: Path, tmp_path: Path, verb: str, case: str
) -> None:
    make, expected = BAD_MODELS[case]
    flags = ["--port", str(free_port())] if verb == "serve" else ["--prompt", "x"]
    cache = tmp_path / "models"
    said = sentence(run(verb, make(tiny, tmp_path / "model"), *flags, "--cache-dir", cache))
    assert re.search(expected, said), said
    left = [path.name for path in cache.rglob("*") if path.suffix != ".lock" and path.name != ".locks"]
    assert left in ([], ["registry.sqlite"])


# ------------------------------------------------------------------ flags
@pytest.mark.parametrize("verb", ["serve", "generate"])
@pytest.mark.parametrize(
    ("flag", "value"), [("--kv-quant", "5"), ("--dtype", "int3"), ("--cache-dir", "a file, no folder")]
)
def test_bad_values(
    run: Callable[..., CompletedProcess[str]], tiny: Path, tmp_path: Path, verb: str, flag: str, value: str
) -> None:
    model = tiny
    if flag == "--cache-dir":  # a root user may write anywhere but below a file
        (tmp_path / value).write_text("x", "utf-8")
        value = str(tmp_path / value / "models")
        model = _gguf(tmp_path / "small.gguf", tiny_model().to_bytes())
    flags = ["--port", str(free_port())] if verb == "serve" else ["--prompt", "x"]
    assert value in sentence(run(verb, model, *flags, flag, value))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cpu-activations", "int7"], "int7"),
        (["--thinking", "maybe"], "--thinking takes on or off"),
        (["--host", "203.0.113.1"], "--host"),
    ],
)
def test_bad_values_of_serve(
    run: Callable[..., CompletedProcess[str]], tiny: Path, arguments: list[str], expected: str
) -> None:
    assert expected in sentence(run("serve", tiny, "--port", str(free_port()), *arguments))


def test_a_port_in_use(run: Callable[..., CompletedProcess[str]], tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = sentence(run("serve", tiny, "--port", str(port)))
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "99999"],
        ["serve", "--nonsense"],
        ["--max-waiting", "0"],
        ["generate", "--temperature", "hot"],
        ["no-such-verb"],
    ],
)
def test_usage_errors(run: Callable[..., CompletedProcess[str]], arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ what works
def test_generate(run: Callable[..., CompletedProcess[str]], tiny: Path) -> None:
    flags = ("--max-tokens", "9", "--temperature", "0.8", "--seed", "4")
    said = run("generate", tiny, "--prompt", "what is there?", *flags)
    piped = run("generate", tiny, *flags, stdin="what is there?")
    with load(str(tiny)) as model:
        own = model.generate("what is there?", max_tokens=9, temperature=0.8, seed=4).text
    assert said.returncode == piped.returncode == 0
    assert said.stdout == piped.stdout == own + "\n"


@pytest.mark.parametrize(("prompt", "expected"), [("x" * CONTEXT, f"the context {CONTEXT}"), ("", "prompt")])
def test_generate_refuses_a_prompt(
    run: Callable[..., CompletedProcess[str]], tiny: Path, prompt: str, expected: str
) -> None:
    done = run("generate", tiny, "--raw", stdin=prompt)
    assert done.returncode == 1
    assert expected in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_version_and_help(run: Callable[..., CompletedProcess[str]]) -> None:
    version = run("--version")
    assert (version.returncode, version.stdout, version.stderr) == (0, f"mantou {__version__}\n", "")
    shown = run("help", "serve")
    assert shown.returncode == 0
    assert shown.stdout == run("serve", "--help").stdout
    assert "--kv-quant" in shown.stdout


def test_get_ls_scan_gc(run: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    model = _gguf(tmp_path / "small.gguf", tiny_model().to_bytes())
    cache = ("--cache-dir", tmp_path / "models")
    assert run("ls", *cache).returncode == 0
    got = run("get", model, *cache)
    assert got.returncode == 0
    folder = Path(got.stdout.strip())
    assert (folder / "model.safetensors").is_file()
    listed, scanned, garbage = run("ls", *cache), run("scan", *cache), run("gc", "--dry-run", *cache)
    assert [done.returncode for done in (listed, scanned, garbage)] == [0, 0, 0]
    assert "small" in listed.stdout
    assert str(folder) in scanned.stdout
    assert (folder / "model.safetensors").is_file()
    answer = run("generate", "small", "--raw", "--prompt", "hello", "--max-tokens", "3", *cache)
    assert answer.returncode == 0
