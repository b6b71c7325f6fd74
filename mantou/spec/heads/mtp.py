"""The multi-token-prediction layers that models bring themselves, and that mlx-lm's loaders drop.

Two layouts. `mtp.*` (Qwen3-Next, Qwen3.5; dense and with experts): fc over both norms, one layer with full attention,
`mtp.norm`; its output is what the head sees and what the next guess goes on from. `model.layers.N.*` beyond the last
layer (DeepSeek V3 and its relatives, GLM 4.5 and later): eh_proj over enorm and hnorm, a layer of the model's own
sort, `shared_head.norm`; the next guess goes on from what stands before that norm. Embedding and head are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.models import families
from mantou.models.checkpoint import read_json, weight_files
from mantou.models.load import ALIASES, read_weights
from mantou.spec.heads.graft import Mix, graft, load
from mantou.spec.heads.parts import Target

_QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
_DEEPSEEK = ("eh_proj", "enorm", "hnorm")
_QWEN_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_CENTRE = 0.5  # norm weights below it on average are stored as the distance from 1


def layout_of(names: Iterable[str]) -> str | None:
    """`mtp`, the prefix of the layer beyond the last one, or None if there is no such layer."""
    for name in names:
        if name.endswith("mtp.fc.weight"):
            return name.removesuffix(".fc.weight")
        if name.endswith(".eh_proj.weight"):
            return name.removesuffix(".eh_proj.weight")
    return None


class Mtp:
    """A `HeadGraph` of either layout. `folder` may be the target's own, or one that holds nothing else."""

    kind = "mtp"
    taps = ()

    def __init__(self, folder: Path, target: Target) -> None:
        config = read_json(folder / "config.json")
        weights = read_weights(weight_files(folder))
        prefix = layout_of(weights)
        if prefix is None:
            raise ModelError(
                f"{folder} holds no layer that predicts further tokens; serve it with --mtp off."
            )
        family_name = str(config.get("model_type"))
        family = families.check(ALIASES.get(family_name, family_name))
        text: dict[str, Any] = dict(config.get("text_config") or config)
        if text.get("hidden_size") != target.hidden_size or text.get("vocab_size") != target.vocab_size:
            raise ModelError(
                f"The prediction layer in {folder} is for {text.get('hidden_size')} numbers and "
                f"{text.get('vocab_size')} tokens, and {target.name} has {target.hidden_size} and "
                f"{target.vocab_size}; choose the one of this model."
            )
        self.vocab_size = target.vocab_size
        self.ids: mx.array | None = None
        self._vocabulary = target.vocabulary
        mine = _below(weights, prefix)
        deepseek = "eh_proj.weight" in mine
        names = _DEEPSEEK if deepseek else _QWEN
        if not deepseek and _around_zero(weights, mine):
            mine = {n: w + 1.0 if w.ndim == 1 and "norm" in n else w for n, w in mine.items()}
        mixing = {n: w for n, w in mine.items() if n.split(".")[0] in names}
        width, eps = target.hidden_size, float(text.get("rms_norm_eps", 1e-6))
        self._mix: Any = Mix(width, eps, names, bias="fc.bias" in mine)
        load(folder, self._mix, mixing, config)
        self._norm: Any = None
        if deepseek:
            self._norm = nn.RMSNorm(width, eps=eps)
            self._norm.weight = mine.pop("shared_head.norm.weight").astype(target.dtype)
            layers = {
                f"layers.0.{n}": w for n, w in mine.items() if n not in mixing and "shared_head" not in n
            }
            text |= {"first_k_dense_replace": 0 if _has_experts(mine) else 1}
        else:
            layers = {n: w for n, w in mine.items() if n not in mixing}
            text |= {"full_attention_interval": 1, "tie_word_embeddings": True}
        text |= {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
        if deepseek:
            layers["norm.weight"] = mx.ones(width)
        named = {f"model.{name}": array for name, array in layers.items()}
        built = {**config, "text_config": text} if "text_config" in config else text
        self._graft = graft(folder, family, built, named, target)
        if deepseek:
            self._graft.graph.norm = nn.Identity()
        self.kv = self._graft.kv
        self._mix.set_dtype(target.dtype)
        mx.eval(self._mix.parameters())
        target.install(self._mix)

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        return self._graft(self._mix(self._vocabulary.embed(tokens), hidden), tokens)

    def logits(self, features: mx.array) -> mx.array:
        return self._vocabulary.project(features if self._norm is None else self._norm(features))


def _below(weights: Mapping[str, mx.array], prefix: str) -> dict[str, mx.array]:
    start = f"{prefix}."
    return {name[len(start) :]: array for name, array in weights.items() if name.startswith(start)}


def _around_zero(weights: Mapping[str, mx.array], mine: Mapping[str, mx.array]) -> bool:
    """Whether norms are stored as their distance from 1, as the publisher does: mlx-lm adds it where it converts, and
    tells so by the convolutions. A folder without any shows it in the numbers."""
    convolutions = [array for name, array in weights.items() if name.endswith("conv1d.weight")]
    if convolutions:
        return convolutions[0].shape[-1] != 1
    norms = [array for name, array in mine.items() if array.ndim == 1 and name.endswith("norm.weight")]
    return bool(norms) and float(mx.mean(mx.concatenate([n.astype(mx.float32) for n in norms]))) < _CENTRE


def _has_experts(mine: Mapping[str, mx.array]) -> bool:
    return any(".experts." in name or ".switch_mlp." in name for name in mine)
