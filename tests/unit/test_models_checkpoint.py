from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mantou.errors import ModelError
from mantou.models.checkpoint import (
    check_safetensors,
    generation_config,
    read_config,
    read_json,
    weight_files,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.ones((3, 5)), "b": mx.zeros((2,), mx.int32)}, {"format": "mlx"})
    return path


def sentence(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_safetensors(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith("download the model again.")
    assert "\n" not in message
    return message


def with_header(path: Path, header: bytes, length: int | None = None, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def test_a_whole_file_passes(file: Path) -> None:
    check_safetensors(file)


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    """Every prefix: within the length, within the header, within the data, one byte short."""
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        message = sentence(file)
        assert "truncated or not a safetensors file" in message or f"has {size} bytes" in message


def test_a_file_with_bytes_behind_its_end_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0")
    assert f"has {len(whole) + 1} bytes instead of {len(whole)}" in sentence(file)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 257 << 20, 1000])
def test_a_header_length_beyond_the_file_or_any_sane_size_is_refused(length: int, tmp_path: Path) -> None:
    assert "truncated" in sentence(with_header(tmp_path / "f", b"{}", length))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b"5",
        b'{"a": 5}',
        b'{"a": {}}',
        b'{"a": {"data_offsets": [0]}}',
        b'{"a": {"data_offsets": ["x", "y"]}}',
        b'{"a": {"data_offsets": null}}',
    ],
)
def test_a_header_that_describes_no_tensors_is_refused(header: bytes, tmp_path: Path) -> None:
    assert "corrupt header" in sentence(with_header(tmp_path / "f", header))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_no_content_at_all_raises_anything_but_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    if content != struct.pack("<Q", 2) + b"{}":  # the one valid file that holds nothing
        sentence(path)


# ------------------------------------------------------------------ folders
def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def test_the_files_of_a_folder_are_found_in_order(file: Path) -> None:
    second = file.with_name("model-00002-of-00002.safetensors")
    second.write_bytes(file.read_bytes())
    assert weight_files(file.parent) == [second, file]


def test_a_missing_shard_is_named(file: Path) -> None:
    index = {"weight_map": {"a": file.name, "b": "model-00002-of-00002.safetensors"}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelError, match=r"lacks model-00002-of-00002\.safetensors; download the model again\."
    ):
        weight_files(file.parent)


@pytest.mark.parametrize("index", ["[1]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_corrupt_index_is_a_sentence(index: str, file: Path) -> None:
    file.with_name("model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="download the model again"):
        weight_files(file.parent)


def test_a_folder_without_weights_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model\*\.safetensors file"):
        weight_files(tmp_path)


def test_one_truncated_shard_refuses_the_folder(file: Path) -> None:
    file.with_name("model-2.safetensors").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model-2\.safetensors has"):
        weight_files(file.parent)


def test_eos_of_the_generation_config_wins(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"model_type": "llama", "eos_token_id": 1},
        generation_config={"eos_token_id": [2, 3]},
    )
    assert read_config(tmp_path)["eos_token_id"] == [2, 3]
    assert generation_config(tmp_path) == {"eos_token_id": [2, 3]}


def test_a_folder_without_generation_config_has_no_defaults(tmp_path: Path) -> None:
    write(tmp_path, config={"model_type": "llama", "eos_token_id": 1})
    assert read_config(tmp_path)["eos_token_id"] == 1
    assert generation_config(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json; give a folder with an MLX model in it."),
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama", "model_file": "evil.py"}', r"wants to run its own code \(evil\.py\)"),
    ],
)
def test_a_config_that_cannot_be_used_is_a_sentence(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        write(tmp_path, config=text)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read"):
        read_json(tmp_path / "config.json")
