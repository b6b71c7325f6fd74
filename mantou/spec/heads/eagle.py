"""EAGLE heads: fc([embedding of a token; hidden state that drew it]) -> decoder layers -> the target's head.

The layout is that of the public checkpoints of EAGLE and EAGLE-2 (arXiv:2401.15077): `fc`, `layers.N`, without an input
norm in the first layer and without a last norm; `embed_tokens` and `lm_head` only where they are not the target's. Read
as well, if they are there: those norms, and `d2t` of EAGLE-3, which says for fewer draft tokens how far each is from
the target's (`scripts/distil_head.py` writes both).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.models.load import family_module
from mantou.spec.heads.parts import Checkpoint, Target, draft_ids, fewer_tokens, finish, own_rows

_SKIPPED = ("t2d", "d2t", "rotary_emb.inv_freq")


class _Layers(nn.Module):
    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, mx.array]) -> None:
        super().__init__()
        llama = family_module("llama")
        config = {"model_type": "llama", "max_position_embeddings": 1 << 17, **checkpoint.config}
        args = llama.ModelArgs.from_dict(
            {**config, "num_hidden_layers": checkpoint.size("num_hidden_layers")}
        )
        width = args.hidden_size
        self.fc = nn.Linear(2 * width, width, bias="fc.bias" in names)
        self.layers = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        for i, layer in enumerate(self.layers):
            if f"layers.{i}.input_layernorm.weight" not in names:
                layer.input_layernorm = nn.Identity()
        if "norm.weight" in names:
            self.norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        if "lm_head.weight" in names:
            self.lm_head = nn.Linear(width, names["lm_head.weight"].shape[0], bias=False)
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(checkpoint.size("vocab_size"), width)


class Eagle:
    """A `HeadGraph`."""

    kind = "eagle"
    taps = ()

    def __init__(self, folder: Path, target: Target) -> None:
        checkpoint = Checkpoint.read(folder)
        checkpoint.check(target)
        if "fc.weight" not in checkpoint.weights:
            raise ModelError(f"{folder} holds no fc.weight; this is not an EAGLE head.")
        self.vocab_size = target.vocab_size
        self.ids = draft_ids(checkpoint)
        weights = {n: w for n, w in checkpoint.weights.items() if not n.endswith(_SKIPPED)}
        self._module: Any = _Layers(checkpoint, weights)
        checkpoint.load_into(self._module, weights)
        if self.ids is not None and "lm_head" not in self._module:
            self._module.lm_head = fewer_tokens(target, self.ids)
        args = self._module.layers[0].args
        head_dim = args.head_dim or args.hidden_size // args.num_attention_heads
        self.kv = own_rows(len(self._module.layers), args.num_key_value_heads, head_dim, target)
        finish(self._module, target)
        self._embed = self._module.get("embed_tokens", target.vocabulary.embed)
        self._project = self._module.get("lm_head", target.vocabulary.project)

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        module = self._module
        known = self._embed(tokens)
        x = module.fc(mx.concatenate([known, hidden.astype(known.dtype)], axis=-1))
        mask = self.kv.caches[0].make_mask(tokens.shape[1])
        for layer, cache in zip(module.layers, self.kv.caches, strict=True):
            x = layer(x, mask, cache)
        return module.norm(x) if "norm" in module else x

    def logits(self, features: mx.array) -> mx.array:
        return self._project(features)
