"""From a model folder to an evaluated graph: the only module that knows mlx_lm. Knows no requests.

The package `mlx_lm` imports transformers (1.5 to 3 s) and lowers RLIMIT_NOFILE; its model files need neither. So the
package is entered by its path, without running its `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ConfigError, ModelError
from mantou.kv.shapes import LayerShape
from mantou.models import families
from mantou.models.checkpoint import read_config, weight_files
from mantou.models.families import Family
from mantou.models.graph_imports import lenient
from mantou.models.layouts import measure

# mlx-lm keeps these names in its utils module, which imports transformers.
ALIASES = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}


DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}  # --dtype


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An evaluated graph and what its folder said of it."""

    module: Any  # an mlx_lm Model: (inputs [B, T], cache=list) -> logits [B, T, V]
    config: Mapping[str, Any]
    family: Family
    shapes: tuple[LayerShape, ...]  # what the graph's caches hold
    dtype: str
    weights_bytes: int
    notes: tuple[str, ...]


def enter_mlx_lm() -> None:
    """Makes `mlx_lm.models.*` importable without running the package's `__init__`."""
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "mlx-lm is not installed; install mantou with its dependencies (pip install 'mantou[cpu]')."
        )
    package = types.ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["mlx_lm"] = package


def family_module(family: str) -> types.ModuleType:
    """The module `mlx_lm.models.<family>`. Raises ModelError with the supported families if there is none."""
    enter_mlx_lm()
    name = f"mlx_lm.models.{family}"
    try:
        with lenient():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModelError(families.refusal(family, "mlx-lm has no graph for it")) from None


def make_caches(module: Any) -> tuple[Any, ...]:
    """One mlx-lm cache a layer, as the graph itself would make them."""
    if hasattr(module, "make_cache"):
        return tuple(module.make_cache())
    kv_cache = importlib.import_module("mlx_lm.models.cache").KVCache
    return tuple(kv_cache() for _ in module.layers)


def arrays_cache() -> type:
    """mlx-lm's class of recurrent caches, for graphs that ask for it by isinstance."""
    enter_mlx_lm()
    return importlib.import_module("mlx_lm.models.cache").ArraysCache


def build(family: str, config: Mapping[str, Any]) -> Any:
    """The graph with unset weights."""
    source = family_module(family)
    try:
        return source.Model(source.ModelArgs.from_dict(dict(config)))
    except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"config.json does not describe a {family} model mlx-lm can build ({error}); check the model folder."
        ) from None


def quantize(module: nn.Module, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Replaces the layers whose weights are packed; each with its own bits and group size."""
    quantization = config["quantization"]

    def choose(path: str, layer: Any) -> bool | dict[str, Any]:
        if path in quantization:
            return quantization[path]
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return False
        if quantization.get("mode", "affine") != "affine":
            return True
        inputs = layer.weight.shape[-1]
        packed, scales = weights[f"{path}.weight"], weights[f"{path}.scales"]
        return {"group_size": inputs // scales.shape[-1], "bits": packed.shape[-1] * 32 // inputs}

    nn.quantize(
        module,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=choose,
    )


def read_weights(files: list[Path]) -> dict[str, mx.array]:
    """All arrays of these files, unevaluated. Raises ModelError."""
    weights: dict[str, mx.array] = {}
    for path in files:
        try:
            loaded = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{path} cannot be loaded ({error}); download the model again.") from None
        assert isinstance(loaded, dict), "a safetensors file maps names to arrays"
        weights.update(loaded)
    return weights


def choose_dtype(asked: str | None, quantized: bool, stored: set[mx.Dtype], on_cpu: bool) -> mx.Dtype | None:
    """The dtype of all floating weights; None leaves the checkpoint's own."""
    if asked is not None:
        return DTYPES[asked]
    # float16 arithmetic is emulated on a CPU (32x slower), and packed weights want float32 scales there.
    if on_cpu and (mx.float16 in stored or quantized):
        return mx.float32
    return None


def _floating(weights: Mapping[str, mx.array]) -> set[mx.Dtype]:
    return {array.dtype for array in weights.values() if mx.issubdtype(array.dtype, mx.floating)}


def _headless(
    config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """A checkpoint of the bare graph as one of the language model whose head is its embedding."""
    prefixed = any(name.startswith(("model.", "language_model.")) for name in weights)
    named = {name if prefixed else f"model.{name}": value for name, value in weights.items()}
    return {**config, "tie_word_embeddings": True}, {n: a for n, a in named.items() if "lm_head" not in n}


def load(folder: Path, *, dtype: str | None = None, headless: bool = False) -> LoadedModel:
    """Loads and evaluates a model on the calling thread, which must be the one that runs it.

    `headless`: only the hidden states are wanted, so the checkpoint may lack a vocabulary head and the names of one.
    Raises ModelError in one sentence for a folder that is corrupt, needs its own code, or is of an unsupported family,
    and ConfigError for an unknown `dtype`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype takes {', '.join(DTYPES)}, not {dtype!r}.")
    config = read_config(folder)
    model_type = str(config["model_type"])
    family = families.check(ALIASES.get(model_type, model_type))
    quantized = bool(config.get("quantization"))
    if not quantized and (foreign := config.get("quantization_config")):
        tool = foreign.get("quant_method") if isinstance(foreign, dict) else None
        raise ModelError(
            f"{folder} is quantised by {tool or 'another tool'}; "
            "convert it to MLX first (mlx_lm.convert) or choose an mlx-community copy."
        )
    weights = read_weights(weight_files(folder))
    if headless:
        config, weights = _headless(config, weights)
    module = build(family.name, config)
    try:
        weights = module.sanitize(weights) if hasattr(module, "sanitize") else weights
        if quantized:
            quantize(module, config, weights)
        module.load_weights(list(weights.items()), strict=True)
    except (ValueError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__  # one line
        raise ModelError(f"The weights in {folder} do not fit its config.json ({reason}).") from None
    stored = _floating(weights)
    del weights
    target = choose_dtype(dtype, quantized, stored, mx.default_device() == mx.cpu)
    if target is not None:
        module.set_dtype(target)
    module.eval()
    mx.eval(module.parameters())
    notes = ()
    if target is not None and stored != {target}:
        notes = (f"weights of {', '.join(sorted(_short(d) for d in stored))} run as {_short(target)}",)
    return describe(module, config, family, notes)


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def describe(
    module: Any, config: Mapping[str, Any], family: Family, notes: tuple[str, ...] = ()
) -> LoadedModel:
    """Wraps an evaluated graph, loaded or made by a test."""
    from mlx.utils import tree_flatten

    arrays: list[mx.array] = list(dict(tree_flatten(module.parameters())).values())
    floating = [a for a in arrays if mx.issubdtype(a.dtype, mx.floating)]
    largest = max(floating, key=lambda a: a.size).dtype if floating else mx.float32
    return LoadedModel(
        module=module,
        config=config,
        family=family,
        shapes=measure(module, make_caches(module)),
        dtype=_short(largest),
        weights_bytes=sum(array.nbytes for array in arrays),
        notes=notes,
    )
