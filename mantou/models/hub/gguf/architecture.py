"""Names, shapes and settings of the GGUF architectures that are converted. Knows no tokenizer and no files.

One `Architecture` a family: how llama.cpp's tensor names map to the names of the MLX graph, what llama.cpp changed
in the numbers when it wrote the file, and how the metadata becomes a config.json. Source: llama.cpp's
convert_hf_to_gguf.py and gguf-py/gguf/constants.py (names, row order of Q and K, `1 + weight` norms of Gemma).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mantou.errors import ModelError
from mantou.models.hub.gguf.metadata import Metadata

ROPE_FACTORS = "rope_freqs.weight"

Config = dict[str, Any]

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Shapes by GGUF part, in terms of the config; parts that are not here are norms over the hidden size.
_SHAPES = {
    "attn_q": ("q", "hidden"),
    "attn_k": ("kv", "hidden"),
    "attn_v": ("kv", "hidden"),
    "attn_output": ("hidden", "q"),
    "ffn_gate": ("ff", "hidden"),
    "ffn_up": ("ff", "hidden"),
    "ffn_down": ("hidden", "ff"),
    "token_embd": ("vocab", "hidden"),
    "output": ("vocab", "hidden"),
    "attn_q_norm": ("head",),
    "attn_k_norm": ("head",),
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GGUF `general.architecture`. `biases` names the projections that must have a bias vector."""

    name: str
    blocks: Mapping[str, str]
    extend_config: Callable[[Config, Metadata], None]
    biases: Sequence[str] = ()
    interleaved_rotary: bool = False  # rows of Q and K are stored for interleaved rotary pairs
    norm_offset: float = 0.0  # norms are stored as this number + weight

    def mlx_name(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None if the name is not known."""
        parts = name.split(".")
        tail = parts[-1]
        if tail not in ("weight", "bias"):
            return None
        if len(parts) == 2 and tail == "weight" and parts[0] in _TOP:
            return f"{_TOP[parts[0]]}.{tail}"
        if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in self.blocks:
            if tail == "bias" and parts[2] not in self.biases:
                return None
            return f"model.layers.{parts[1]}.{self.blocks[parts[2]]}.{tail}"
        return None

    def required(self, num_layers: int) -> list[str]:
        """Every GGUF tensor name that a complete file has."""
        names = ["token_embd.weight", "output_norm.weight"]
        for layer in range(num_layers):
            names += [f"blk.{layer}.{part}.weight" for part in self.blocks]
            names += [f"blk.{layer}.{part}.bias" for part in self.biases]
        return names

    def shape(self, name: str, config: Config) -> tuple[int, ...]:
        """The shape that a tensor must have; a bias is as long as its matrix has rows."""
        *_, part, tail = name.split(".")
        sizes = {
            "hidden": config["hidden_size"],
            "ff": config["intermediate_size"],
            "q": config["num_attention_heads"] * config["head_dim"],
            "kv": config["num_key_value_heads"] * config["head_dim"],
            "head": config["head_dim"],
            "vocab": config["vocab_size"],
        }
        axes = _SHAPES.get(part, ("hidden",))
        return tuple(sizes[axis] for axis in (axes[:1] if tail == "bias" else axes))

    def rotary_heads(self, name: str, config: Config) -> int:
        """Heads whose rows must be put back in order, 0 where the rows are in order."""
        part = name.split(".")[-2]
        if not self.interleaved_rotary:
            return 0
        return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part, 0)


def find(metadata: Metadata) -> Architecture:
    """The architecture of a file. Raises ModelError that names those which are converted."""
    name = metadata.text("general.architecture")
    experts = metadata.integer(f"{name}.expert_count", 0)
    if name in ARCHITECTURES and experts == 0:
        return ARCHITECTURES[name]
    kind = f"{name} with experts" if experts else name
    raise ModelError(
        f"GGUF files of architecture {kind} are not converted (only {', '.join(ARCHITECTURES)}); "
        "use an MLX version of the model."
    )


def build_config(
    architecture: Architecture,
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
) -> Config:
    """config.json as mlx-lm's graph reads it, without the quantisation part.

    `shapes` are the tensors of the file; `rope_factors` the per-frequency divisors of Llama 3, if the file has them.
    """
    name = architecture.name
    num_layers = metadata.size(f"{name}.block_count")
    # The count is checked first: a corrupt one must not make a list of billions of names.
    complete = num_layers <= len(shapes) and all(part in shapes for part in architecture.required(num_layers))
    if not complete:
        raise metadata.error(f"it does not have every tensor of {num_layers} layers of {name}")
    heads = metadata.size(f"{name}.attention.head_count")
    hidden = metadata.size(f"{name}.embedding_length")
    config: Config = {
        "model_type": name,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "intermediate_size": metadata.size(f"{name}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size(f"{name}.attention.head_count_kv", heads),
        "head_dim": metadata.size(f"{name}.attention.key_length", hidden // heads),
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0),
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": metadata.size(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    rotary = metadata.integer(f"{name}.rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        raise metadata.error(
            f"rotary over {rotary} of {config['head_dim']} dimensions is not known for {name}"
        )
    scaling = _rope_scaling(metadata, name, config, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    architecture.extend_config(config, metadata)
    return config


def _rope_scaling(
    metadata: Metadata, name: str, config: Config, factors: Sequence[float] | None
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(metadata, config, factors)
    kind = metadata.text(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"rope scaling {kind} is not known")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        original = metadata.integer(f"{name}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(metadata: Metadata, config: Config, factors: Sequence[float]) -> dict[str, Any]:
    """The `llama3` settings behind a table of divisors, which is all that a GGUF file keeps of them.

    Llama 3.1 to 3.3 differ in `factor` only, and the longest waves are divided by exactly that. The table is
    computed again from the guess and must come out the same, so that a file with other settings is refused.
    """
    head_dim = config["head_dim"]
    scaling = {
        "rope_type": "llama3",
        "factor": float(f"{max(factors):.7g}"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if len(factors) == head_dim // 2:
        expected = [
            llama3_divisor(2 * math.pi * config["rope_theta"] ** (2 * i / head_dim), scaling)
            for i in range(head_dim // 2)
        ]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
            return scaling
    raise metadata.error(f"{ROPE_FACTORS} does not hold Llama 3 frequency factors")


def llama3_divisor(wavelength: float, scaling: Mapping[str, Any]) -> float:
    """What Llama 3's rotary scaling divides a frequency of this wavelength by."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    if turns > high:
        return 1.0
    if turns < low:
        return float(scaling["factor"])
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / scaling["factor"] + smooth))


def _extend_llama(config: Config, metadata: Metadata) -> None:
    config.update(architectures=["LlamaForCausalLM"], hidden_act="silu")


def _extend_qwen2(config: Config, metadata: Metadata) -> None:
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise metadata.error("qwen2 with a head size of its own is not known")
    config.update(architectures=["Qwen2ForCausalLM"], hidden_act="silu")


def _extend_qwen3(config: Config, metadata: Metadata) -> None:
    config.update(architectures=["Qwen3ForCausalLM"], hidden_act="silu", attention_bias=False)


def _extend_gemma3(config: Config, metadata: Metadata) -> None:
    # The file does not say how queries are scaled; llama.cpp knows it by the depth: only the 27B (62 layers)
    # divides by the width per head, all others by the head size.
    largest = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    config.update(
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=metadata.integer("gemma3.attention.sliding_window"),
        sliding_window_pattern=6,
        rope_local_base_freq=metadata.number("gemma3.rope.freq_base_swa", 10000.0),
        query_pre_attn_scalar=scalar,
    )


_KNOWN = (
    Architecture("llama", _BLOCK, _extend_llama, interleaved_rotary=True),
    Architecture("qwen2", _BLOCK, _extend_qwen2, biases=("attn_q", "attn_k", "attn_v")),
    Architecture("qwen3", {**_BLOCK, **_QK_NORM}, _extend_qwen3),
    Architecture("gemma3", {**_BLOCK, **_QK_NORM, **_SANDWICH_NORMS}, _extend_gemma3, norm_offset=1.0),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _KNOWN}
