from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mantou.errors import ConfigError, ModelError
from mantou.models import families
from mantou.models.head import SelectedEmbedding, SelectedHead, install
from mantou.models.load import build, load
from mantou.models.runner import layout_names
from mantou.models.taps import TappedLayer
from mantou.models.taps import install as install_taps
from tests.compose.families import FAMILIES, tiny
from tests.unit.model_folders import LLAMA, weights, write_model

TOKENS = mx.array([[1, 2, 3, 4]])


def edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    message = caught.value.message
    assert "\n" not in message
    assert message.endswith(".")
    return message


# ------------------------------------------------------------------ what loads
def test_a_loaded_graph_computes_what_its_weights_say(tmp_path: Path) -> None:
    loaded = load(write_model(tmp_path))
    direct = build("llama", LLAMA)
    direct.load_weights(list(weights().items()))
    assert mx.array_equal(loaded.module(TOKENS), direct(TOKENS))
    assert (loaded.family.name, loaded.dtype, loaded.notes) == ("llama", "float32", ())
    assert layout_names(loaded.shapes) == {"full": 2}
    assert loaded.weights_bytes == sum(array.nbytes for array in weights().values())


def test_shards_are_read_together(tmp_path: Path) -> None:
    write_model(tmp_path)
    items = sorted(weights().items())
    (tmp_path / "model.safetensors").unlink()
    for i, part in enumerate((items[:5], items[5:])):
        mx.save_safetensors(str(tmp_path / f"model-{i}.safetensors"), dict(part))
    assert mx.array_equal(load(tmp_path).module(TOKENS), load(write_model(tmp_path / "whole")).module(TOKENS))


def test_an_alias_of_a_family_is_the_family(tmp_path: Path) -> None:
    assert load(edit(write_model(tmp_path), model_type="mistral")).family.name == "llama"


def floating(module: Any) -> set[mx.Dtype]:
    return {a.dtype for _, a in tree_flatten(module.parameters()) if mx.issubdtype(a.dtype, mx.floating)}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_scales_of_packed_weights_become_float32_on_a_cpu(dtype: mx.Dtype, tmp_path: Path) -> None:
    loaded = load(write_model(tmp_path, dtype=dtype, bits=4))
    assert floating(loaded.module) == {mx.float32}
    assert loaded.module.layers[0].mlp.up_proj.scales.dtype == mx.float32
    assert loaded.dtype == "float32"
    name = str(dtype).rsplit(".", 1)[-1]
    assert loaded.notes == (f"weights of {name} run as float32",)


def test_float16_becomes_float32_on_a_cpu_and_bfloat16_stays(tmp_path: Path) -> None:
    assert floating(load(write_model(tmp_path / "half", dtype=mx.float16)).module) == {mx.float32}
    brain = load(write_model(tmp_path / "brain", dtype=mx.bfloat16))
    assert floating(brain.module) == {mx.bfloat16}
    assert brain.notes == ()


def test_the_asked_dtype_wins(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert load(folder, dtype="bfloat16").dtype == "bfloat16"
    assert load(folder, dtype="float16").notes == ("weights of float32 run as float16",)
    with pytest.raises(ConfigError, match=r"--dtype takes float32, bfloat16, float16, not 'int4'\."):
        load(folder, dtype="int4")


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_may_have_bits_of_their_own(bits: int, tmp_path: Path) -> None:
    """The config states 4 bits; where the packed weights say otherwise, they win."""
    folder = edit(write_model(tmp_path, bits=bits), quantization={"group_size": 64, "bits": 4})
    layer = load(folder).module.layers[0].mlp.up_proj
    assert (layer.bits, layer.group_size) == (bits, 32)


# ------------------------------------------------------------------ what is refused
def test_an_unknown_family_is_refused_with_the_list_of_supported_ones(tmp_path: Path) -> None:
    message = refusal(edit(write_model(tmp_path), model_type="perceptron"))
    assert "'perceptron' are not supported: no such family is known" in message
    assert "llama" in message


def test_an_unsupported_family_is_refused_with_its_reason(tmp_path: Path) -> None:
    name, row = next((n, r) for n, r in families.table().items() if not r.supported)
    assert row.reason in refusal(edit(write_model(tmp_path), model_type=name))


@pytest.mark.parametrize("kind", [["llama"], 7])
def test_a_model_type_that_is_no_name_is_refused(kind: object, tmp_path: Path) -> None:
    assert "are not supported" in refusal(edit(write_model(tmp_path), model_type=kind))


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text("raise SystemExit('it ran')")
    assert "never runs code" in refusal(edit(write_model(tmp_path), model_file="graph.py"))


@pytest.mark.parametrize(
    ("quantization", "tool"), [({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, "another tool")]
)
def test_a_model_packed_by_another_tool_is_refused(
    quantization: dict[str, Any], tool: str, tmp_path: Path
) -> None:
    message = refusal(edit(write_model(tmp_path), quantization_config=quantization))
    assert f"is quantised by {tool}; convert it to MLX first" in message


def test_a_null_quantisation_is_none(tmp_path: Path) -> None:
    folder = edit(write_model(tmp_path), quantization_config=None, quantization=None)
    assert load(folder).dtype == "float32"


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert "do not fit its config.json" in refusal(edit(write_model(tmp_path / "a"), hidden_size=64))
    message = refusal(edit(write_model(tmp_path / "b"), num_hidden_layers=3))
    assert "do not fit its config.json (Missing 9 parameters: model.layers.2." in message
    lacking = write_model(tmp_path / "c")
    mx.save_safetensors(str(lacking / "model.safetensors"), dict(list(weights().items())[1:]))
    assert "do not fit its config.json" in refusal(lacking)


@pytest.mark.parametrize("quantization", [{"bits": 4}, {"group_size": 32, "bits": 4, "mode": "magic"}])
def test_a_malformed_quantisation_is_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    folder = edit(write_model(tmp_path, bits=4), quantization=quantization)
    assert "do not fit its config.json" in refusal(folder)


@pytest.mark.parametrize("changes", [{"hidden_size": None}, {"num_attention_heads": 0}, {"rope_scaling": 5}])
def test_a_config_that_describes_no_graph_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "check the model folder" in refusal(edit(write_model(tmp_path), **changes))


def test_a_config_without_a_needed_key_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "does not describe a llama model" in refusal(folder)


def test_a_truncated_file_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "download the model again" in refusal(tmp_path)


@pytest.mark.parametrize(
    "entry", [{"dtype": "F32"}, {"dtype": "X9", "shape": [2]}, {"dtype": "F32", "shape": [99]}]
)
def test_a_header_that_lies_about_a_tensor_is_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    header = json.dumps({"model.norm.weight": {**entry, "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    refusal(folder)


# ------------------------------------------------------------------ mlx_lm, families, head
def test_mlx_lm_is_entered_without_its_package_and_file_limit() -> None:
    program = (
        "import resource, sys; before = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "from mantou.models.load import family_module; family_module('llama');"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before;"
        "assert 'transformers' not in sys.modules and 'mlx_lm.models.llama' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_every_row_of_the_family_table_says_how_or_why_not() -> None:
    for name, row in families.table().items():
        assert row.name == name
        assert bool(row.layouts) == row.supported
        assert bool(row.reason) == (not row.supported)
    assert set(FAMILIES) <= set(families.table())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "gpt2"])
def test_the_head_runs_on_the_wanted_positions_only(family: str) -> None:
    module = tiny(family)
    expected = module(TOKENS)
    selection = install(module)
    assert selection is not None
    assert mx.array_equal(module(TOKENS), expected), "nothing is selected, so nothing changes"
    selection.index = mx.array([[2]])
    found = module(TOKENS)
    assert found.shape == (1, 1, expected.shape[-1])
    assert mx.allclose(found[0, 0], expected[0, 2], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_graph_that_many_runners_had_keeps_nothing_of_those_before(family: str) -> None:
    module = tiny(family)
    for _ in range(3):
        selection = install(module)
        taps = install_taps(module, (0, 1))
    wrapped = [m for m in module.modules() if isinstance(m, SelectedHead | SelectedEmbedding | TappedLayer)]
    assert len(wrapped) == 3, "one selection and two taps"
    assert selection is not None
    selection.index = mx.array([[2]])
    assert module(TOKENS).shape[1] == 1
    assert taps.take() is not None


def test_a_module_that_is_not_the_head_is_left_alone() -> None:
    """A graph whose last step is no module with a known name: all positions project."""
    module = tiny("llama")
    module.decoder = module.pop("lm_head")
    type_ = type(module)

    class Renamed(type_):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return self.decoder(self.model(inputs, cache))

    module.__class__ = Renamed
    before = module(TOKENS)
    assert install(module) is None
    assert mx.array_equal(module(TOKENS), before)
    assert not any(isinstance(m, SelectedHead) for m in module.modules())
