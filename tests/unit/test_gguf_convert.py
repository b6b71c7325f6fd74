from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mantou.errors import ModelError
from mantou.models.hub.gguf import architecture, convert, measure
from tests.unit import gguf_files as files

NUM_BYTES = len(files.tiny_model().to_bytes())


def convert_file(gguf: files.Gguf, folder: Path) -> dict[str, mx.array]:
    out = folder / "out"
    out.mkdir()
    convert(gguf.write(folder / "tiny.gguf"), out, lambda num_bytes: None)
    return mx.load(str(out / "model.safetensors"))


def dequantized(weights: dict[str, mx.array], name: str, bits: int) -> np.ndarray:
    stem = name.removesuffix(".weight")
    if f"{stem}.scales" not in weights:
        return np.array(weights[name].astype(mx.float32))
    return np.array(
        mx.dequantize(weights[name], weights[f"{stem}.scales"], weights[f"{stem}.biases"], 32, bits)
    )


@pytest.mark.parametrize("kind", [files.F32, files.F16, files.BF16, files.Q4_0, files.Q4_1, files.Q8_0])
def test_every_tensor_equals_the_definition(tmp_path: Path, kind: int) -> None:
    gguf = files.tiny_model(kind=kind)
    weights = convert_file(gguf, tmp_path)
    bits = 8 if kind == files.Q8_0 else 4
    shape, _, data = gguf.tensors["blk.1.ffn_down.weight"]
    got = dequantized(weights, "model.layers.1.mlp.down_proj.weight", bits)
    assert np.array_equal(got, files.formula(data, shape, kind))
    dtypes = {files.F16: mx.float16, files.BF16: mx.bfloat16, files.F32: mx.float32}
    assert weights["model.embed_tokens.weight"].dtype == dtypes.get(kind, mx.uint32)
    assert weights["model.norm.weight"].dtype == mx.float32
    assert not [
        name for name, value in weights.items() if name.endswith("scales") and value.dtype != mx.float32
    ]


def test_rotary_rows_of_llama_are_put_back_in_order(tmp_path: Path) -> None:
    gguf = files.tiny_model(kind=files.F32)
    shape, kind, _ = gguf.tensors["blk.0.attn_q.weight"]
    wanted = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    # What llama.cpp's converter does to the rows of Q and K.
    head = shape[0] // files.HEADS
    stored = wanted.reshape(files.HEADS, 2, head // 2, shape[1]).swapaxes(1, 2).reshape(shape)
    gguf.tensors["blk.0.attn_q.weight"] = (shape, kind, stored.tobytes())
    weights = convert_file(gguf, tmp_path)
    assert np.array_equal(np.array(weights["model.layers.0.self_attn.q_proj.weight"]), wanted)


def test_gemma_norms_are_stored_without_the_one(tmp_path: Path) -> None:
    gguf = files.tiny_model("gemma3")
    weights = convert_file(gguf, tmp_path)
    shape, kind, data = gguf.tensors["blk.0.post_ffw_norm.weight"]
    got = np.array(weights["model.layers.0.post_feedforward_layernorm.weight"])
    assert np.array_equal(got, files.formula(data, shape, kind) - 1)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_names_and_shapes_fit_the_graph(tmp_path: Path, arch: str) -> None:
    weights = convert_file(files.tiny_model(arch, files.F32), tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    graph = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = graph.Model(graph.ModelArgs.from_dict(config))
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    logits = model(mx.array([[5, 6, 7]]))
    assert logits.shape == (1, 3, 128)
    assert bool(mx.isfinite(logits).all())


def test_config_states_widths_dtype_and_end_tokens(tmp_path: Path) -> None:
    gguf = files.tiny_model(kind=files.Q4_1)
    shape = gguf.tensors["token_embd.weight"][0]
    rng = np.random.default_rng(0)
    gguf.tensors["token_embd.weight"] = (shape, files.Q8_0, files.random_blocks(rng, shape, files.Q8_0))
    convert_file(gguf, tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    embedding = {"group_size": 32, "bits": 8}
    expected = {"group_size": 32, "bits": 4, "mode": "affine", "model.embed_tokens": embedding}
    assert config["quantization"] == expected
    assert config["torch_dtype"] == "float32"
    assert config["rms_norm_eps"] == 1e-5
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == files.TEMPLATE


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    path = files.tiny_model().write(tmp_path / "tiny.gguf")
    convert(path, out, lambda num_bytes: None, shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1
    assert {name: shard.name for shard in shards for name in mx.load(str(shard))} == index


def test_measure_foretells_what_is_read_and_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    path = files.tiny_model().write(tmp_path / "tiny.gguf")
    read: list[int] = []
    convert(path, out, read.append)
    sizes = measure(path)
    assert sum(read) == sizes.read
    assert sizes.written <= (out / "model.safetensors").stat().st_size <= sizes.written + 16_384


# ------------------------------------------------------------------ rope scaling
def llama3_factors(factor: float) -> bytes:
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    waves = [2 * np.pi * 10000.0 ** (2 * i / 16) for i in range(8)]
    return np.array([architecture.llama3_divisor(wave, scaling) for wave in waves], np.float32).tobytes()


def test_llama3_settings_are_found_from_their_divisors(tmp_path: Path) -> None:
    gguf = files.tiny_model()
    gguf.tensors["rope_freqs.weight"] = ((8,), files.F32, llama3_factors(32.0))
    convert_file(gguf, tmp_path)
    scaling = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    gguf = files.tiny_model()
    gguf.tensors["rope_freqs.weight"] = ((8,), files.F32, np.arange(1, 9, dtype=np.float32).tobytes())
    with pytest.raises(ModelError, match="Llama 3"):
        convert_file(gguf, tmp_path)


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.expert_count": 8}, "llama with experts"),
        ({"llama.block_count": 2_000_000_000}, "every tensor"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.embedding_length": 96}, "shape"),
        ({"llama.rope.dimension_count": 8}, "rotary over 8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "must be a number"),
        ({"tokenizer.ggml.model": "bert"}, "kind bert"),
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.merges": ["q q"]}, "merge rule"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "not a token"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"general.alignment": 24}, "alignment"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, change: dict, message: str) -> None:
    gguf = files.tiny_model()
    gguf.metadata |= change
    with pytest.raises(ModelError, match=message):
        convert_file(gguf, tmp_path)


def test_an_unread_tensor_type_is_named(tmp_path: Path) -> None:
    gguf = files.tiny_model()
    gguf.tensors["token_embd.weight"] = ((128, 256), 12, bytes(128 * 144))
    with pytest.raises(ModelError, match="Q4_K"):
        convert_file(gguf, tmp_path)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    gguf = files.tiny_model()
    gguf.tensors["blk.0.ssm_a.weight"] = ((64,), files.F32, bytes(256))
    with pytest.raises(ModelError, match="ssm_a"):
        convert_file(gguf, tmp_path)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    gguf = files.tiny_model(kind=files.Q8_0)
    shape, kind, data = gguf.tensors["blk.0.ffn_up.weight"]
    gguf.tensors["blk.0.ffn_up.weight"] = (shape, kind, b"\x00\x7c" + data[2:])  # an infinite scale
    with pytest.raises(ModelError, match="ffn_up"):
        convert_file(gguf, tmp_path)


@pytest.mark.parametrize(
    "head", [b"", b"GGUF", b"PK\x03\x04" + bytes(60), b"GGUF" + struct.pack("<IQQ", 1, 0, 0)]
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(head)
    with pytest.raises(ModelError, match=r"GGUF|cut off"):
        measure(path)


@given(cut=st.integers(0, NUM_BYTES - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_file_is_one_clean_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(files.tiny_model().to_bytes()[:cut])
    with pytest.raises(ModelError):
        measure(path)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_converts_or_is_one_clean_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(files.tiny_model().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 6_000))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "out").mkdir()
    (folder / "x.gguf").write_bytes(content)
    try:
        convert(folder / "x.gguf", folder / "out", lambda num_bytes: None)
    except ModelError as error:
        assert "\n" not in error.message  # noqa: PT017  both outcomes are right
