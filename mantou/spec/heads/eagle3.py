"""EAGLE-3 heads (arXiv:2503.01840): three hidden states in one, a wider attention, a vocabulary of their own.

Layout of the public checkpoints: `fc` over the outputs of a low, a middle and a late layer; `midlayer` (or `layers.0`)
with `input_layernorm` of the token's embedding and `hidden_norm` of the hidden state, whose two halves q, k and v take;
`norm`, `lm_head`, and `d2t`, how far each draft token is from the model's. Further guesses go on from the layer's own
output, which takes the place of what `fc` gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.models.load import family_module
from mantou.spec.heads.parts import Checkpoint, Target, draft_ids, fewer_tokens, finish, own_rows

_SKIPPED = ("t2d", "d2t", "rotary_emb.inv_freq")


class _MidLayer(nn.Module):
    def __init__(self, args: Any, llama: Any) -> None:
        super().__init__()
        width = args.hidden_size
        self.self_attn: Any = llama.Attention(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self.self_attn[name].weight.shape[0]
            self.self_attn[name] = nn.Linear(2 * width, rows, bias="bias" in self.self_attn[name])
        self.mlp: Any = llama.MLP(args)
        self.input_layernorm: Any = nn.RMSNorm(width, eps=args.rms_norm_eps)
        self.hidden_norm: Any = nn.RMSNorm(width, eps=args.rms_norm_eps)
        self.post_attention_layernorm: Any = nn.RMSNorm(width, eps=args.rms_norm_eps)

    def __call__(self, known: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        both = mx.concatenate([self.input_layernorm(known), self.hidden_norm(hidden)], axis=-1)
        x = hidden + self.self_attn(both, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Parts(nn.Module):
    def __init__(self, checkpoint: Checkpoint, weights: dict[str, mx.array], num_taps: int) -> None:
        super().__init__()
        llama = family_module("llama")
        config = {"model_type": "llama", "max_position_embeddings": 1 << 17, **checkpoint.config}
        args = llama.ModelArgs.from_dict(config)
        width = args.hidden_size
        self.args = args
        self.fc = nn.Linear(num_taps * width, width, bias="fc.bias" in weights)
        self.midlayer = _MidLayer(args, llama)
        self.norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        if "lm_head.weight" in weights:
            self.lm_head = nn.Linear(width, weights["lm_head.weight"].shape[0], bias=False)
        if "embed_tokens.weight" in weights:
            self.embed_tokens = nn.Embedding(checkpoint.size("vocab_size"), width)


class Eagle3:
    """A `HeadGraph`."""

    kind = "eagle3"

    def __init__(self, folder: Path, target: Target) -> None:
        checkpoint = Checkpoint.read(folder)
        checkpoint.check(target)
        weights = {
            name.replace("layers.0.", "midlayer."): array
            for name, array in checkpoint.weights.items()
            if not name.endswith(_SKIPPED)
        }
        if "fc.weight" not in weights or "midlayer.hidden_norm.weight" not in weights:
            raise ModelError(
                f"{folder} holds no fc.weight or no hidden_norm.weight; this is no EAGLE-3 head."
            )
        self.taps = _taps(checkpoint, target.num_layers)
        self.vocab_size = target.vocab_size
        self.ids = draft_ids(checkpoint)
        self._module: Any = _Parts(checkpoint, weights, len(self.taps))
        checkpoint.load_into(self._module, weights)
        if self.ids is not None and "lm_head" not in self._module:
            self._module.lm_head = fewer_tokens(target, self.ids)
        args = self._module.args
        self._width = args.hidden_size
        self.kv = own_rows(
            1, args.num_key_value_heads, args.head_dim or args.hidden_size // args.num_attention_heads, target
        )
        finish(self._module, target)
        self._embed = self._module.get("embed_tokens", target.vocabulary.embed)
        self._project = self._module.get("lm_head", target.vocabulary.project)

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        module = self._module
        known = self._embed(tokens)
        hidden = hidden.astype(known.dtype)
        if hidden.shape[-1] != self._width:
            hidden = module.fc(hidden)
        return module.midlayer(known, hidden, self.kv.caches[0].make_mask(tokens.shape[1]), self.kv.caches[0])

    def logits(self, features: mx.array) -> mx.array:
        return self._project(self._module.norm(features))


def _taps(checkpoint: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Layers whose outputs it reads. Configurations name those whose inputs these are."""
    named = (checkpoint.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    before = named or (2, num_layers // 2, num_layers - 3)
    return tuple(max(place - 1, 0) for place in before)
