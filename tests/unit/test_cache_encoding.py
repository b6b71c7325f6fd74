from __future__ import annotations

import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from mantou.cache.blocks import as_tokens, key_text, spans
from mantou.cache.encoding import COLUMNS, STATE, BadBlock, Label, decode, encode, header_bytes, read_label
from mantou.kv.pieces import Stack, on_device
from tests.unit.cache_rows import KEY, OTHER


def label(tokens: list[int] | None = None, kind: str = COLUMNS) -> Label:
    *_, span = spans(KEY, as_tokens(tokens or list(range(300))))
    return Label(kind, key_text(KEY), span.parent, span.address, span.lo, span.tokens)


def stacks() -> tuple[Stack, ...]:
    dice = np.random.default_rng(0)
    return (
        Stack(dice.integers(0, 255, (3, 1, 2, 44, 5), np.uint8), "uint8", ((0, 0), (1, 0), (2, 1))),
        Stack(dice.standard_normal((2, 1, 2, 44, 8)).astype(np.float32), "float32", ((0, 1), (1, 1))),
        Stack(dice.integers(0, 1 << 16, (1, 1, 2, 44, 8), np.uint16), "bfloat16", ((2, 0),)),
        Stack(np.zeros((2, 1, 0), np.float32), "float32", ((3, 0), (3, 1))),
    )


def file_bytes(kind: str = COLUMNS) -> bytearray:
    return bytearray(b"".join(encode(label(kind=kind), stacks())))


@pytest.mark.parametrize("kind", [COLUMNS, STATE])
def test_a_file_gives_back_what_was_put_in(kind: str) -> None:
    read = decode(file_bytes(kind), label(kind=kind))
    for got, put in zip(read, stacks(), strict=True):
        assert (got.dtype, got.members) == (put.dtype, put.members)
        assert got.data.dtype == put.data.dtype and np.array_equal(got.data, put.data)
        assert on_device(got.data, got.dtype).shape == put.data.shape


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(file_bytes())
    with safe_open(path, "numpy") as file:
        assert file.metadata()["format"].startswith("mantou")
        assert np.array_equal(file.get_tensor("1"), stacks()[1].data)
    assert mx.load(str(path))["2"].dtype == mx.bfloat16


def test_parts_of_a_larger_array_are_written_as_they_look() -> None:
    whole = stacks()[1]
    part = Stack(whole.data[..., 3:9, :], whole.dtype, whole.members)
    read = decode(b"".join(encode(label(), [part])), label())
    assert np.array_equal(read[0].data, part.data)


def byte_classes() -> dict[str, list[int]]:
    """Positions of each kind of byte in the file."""
    buffer = file_bytes()
    start = header_bytes(buffer)
    text = bytes(buffer[8:start])
    found = {"length": list(range(8)), "data": list(range(start, len(buffer)))}
    for name, value in json.loads(text)["__metadata__"].items():
        quoted = json.dumps(value, separators=(",", ":")).encode()
        at = text.index(b'"%s":' % name.encode() + quoted) + 8
        found[name] = list(range(at, at + len(name) + 3 + len(quoted)))
    known = {p for positions in found.values() for p in positions}
    found["header"] = [p for p in range(8, start) if p not in known]
    return found


@pytest.mark.parametrize("kind", list(byte_classes()))
def test_a_flipped_bit_anywhere_is_noticed(kind: str) -> None:
    good, dice = file_bytes(), random.Random(kind)
    positions = byte_classes()[kind]
    for position in dice.sample(positions, min(len(positions), 60)):
        bad = bytearray(good)
        bad[position] ^= 1 << dice.randrange(8)
        with pytest.raises(BadBlock):
            decode(bad, label())


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 200, -1, -5000])
def test_a_truncated_file_is_noticed(size: int) -> None:
    buffer = file_bytes()
    with pytest.raises(BadBlock):
        decode(buffer[: size % len(buffer)], label())
    with pytest.raises(BadBlock):
        decode(buffer + b"\0", label())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a safetensors file at all",
        b"\xff" * 64,
        (16).to_bytes(8, "little") + b'{"__metadata__"}',
        (4).to_bytes(8, "little") + b"[1] ",
        (44).to_bytes(8, "little") + b'{"__metadata__":{"format":"somebody else"}} ',
    ],
)
def test_a_foreign_file_is_noticed(content: bytes) -> None:
    with pytest.raises(BadBlock):
        decode(content, label())
    with pytest.raises(BadBlock):
        read_label(content)


def test_a_file_of_another_format_version_is_noticed() -> None:
    with pytest.raises(BadBlock, match="format"):
        decode(file_bytes().replace(b"prefix block 1", b"prefix block 0"), label())


def test_a_good_file_under_another_name_is_not_taken() -> None:
    with pytest.raises(BadBlock, match="another block"):
        decode(file_bytes(), label(list(range(1, 301))))
    with pytest.raises(BadBlock, match="another block"):
        decode(file_bytes(STATE), label())


def test_addresses_depend_on_the_key_and_on_everything_before() -> None:
    prompts = [list(range(600)), [1, *range(1, 600)], list(range(599)), [*range(599), 7]]
    found = {span.address for prompt in prompts for span in spans(KEY, as_tokens(prompt))}
    found |= {span.address for span in spans(OTHER, as_tokens(prompts[0]))}
    # Two first blocks, then two second ones, then a third one for each prompt; the other key shares nothing.
    assert len(found) == 2 + 2 + 4 + 3


@pytest.mark.parametrize("name", ["tokens", "parent", "address", "kind", "lo"])
def test_a_label_is_checked_without_the_data(name: str) -> None:
    """For files that the table does not know: the name must follow from what the file says of itself."""
    good = file_bytes()
    assert read_label(bytes(good[: header_bytes(good)])).file_name == label().file_name
    position = byte_classes()[name][-3]
    good[position] = ord("z") if name in ("kind", "lo") else ord("0") + (good[position] == ord("0"))
    with pytest.raises(BadBlock):
        read_label(bytes(good[: header_bytes(good)]))
