"""DSpark, DeepSpec and DFlash heads: a block of guesses at once, over projected hidden states of several layers.

Layout of the public checkpoints (DeepSpec's, and the same tensors as vLLM's speculators package them): the outputs of
`target_layer_ids`, side by side, go through `fc` and `hidden_norm`; every layer makes keys and values of them, one
place a token. A block holds the last known token and then masks; its places see all of that context and one another.
`markov_head` adds what the token before says of the next one, and `confidence_head` says how far the guesses hold.
Embedding and `lm_head` are the head's own where it brings them. Only the family with Qwen3's layers is read. DFlash
(arXiv:2602.06036) has neither of the two small heads and guesses nothing at the known token's own place. Layers that
are `sliding_attention` see `sliding_window` places of the context, and of the block those up to their own unless the
configuration says otherwise (`sights`). DFlash 2 is a sibling (`dflash2.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.models.load import family_module
from mantou.spec.heads.parts import Checkpoint, Target, draft_ids, fewer_tokens, finish, own_rows

_SKIPPED = ("t2d", "d2t", "rotary_emb.inv_freq")
_KNOWN = ("qwen3", "dspark", "dspark_qwen3")
FOREIGN = ("layer_scalar", "log_snr", "sink")  # parts of other families
_NEWER = ("selector", "conv")  # and of DFlash 2

# Places of the context that a layer sees (None = all), and whether it sees no place of the block behind its own.
Sight = tuple[int | None, bool]


class _Attention(nn.Module):
    """Qwen3's projections, over keys and values that the cache holds."""

    def __init__(self, args: Any, qwen3: Any) -> None:
        super().__init__()
        plain: Any = qwen3.Attention(args)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            self[name] = plain[name]
        self._rope = plain.rope
        self._heads, self._kv_heads, self._scale = plain.n_heads, plain.n_kv_heads, plain.scale

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, -1)

    def remember(self, x: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Keys and values of x [B, T, D] at the cache's places; returns those of all places that are read."""
        keys = self["k_norm"](self._split(self["k_proj"](x), self._kv_heads)).transpose(0, 2, 1, 3)
        values = self._split(self["v_proj"](x), self._kv_heads).transpose(0, 2, 1, 3)
        return cache.update_and_fetch(self._rope(keys, offset=cache.offset), values)

    def __call__(self, x: mx.array, mask: mx.array, cache: Any) -> mx.array:
        queries = self["q_norm"](self._split(self["q_proj"](x), self._heads)).transpose(0, 2, 1, 3)
        queries = self._rope(queries, offset=cache.offset)
        keys, values = self.remember(x, cache)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=mask)
        return self["o_proj"](out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class Layer(nn.Module):
    def __init__(self, args: Any, qwen3: Any) -> None:
        super().__init__()
        self.self_attn: Any = _Attention(args, qwen3)
        self.mlp: Any = qwen3.MLP(args.hidden_size, args.intermediate_size)
        self.input_layernorm: Any = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm: Any = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: mx.array, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Parts(nn.Module):
    def __init__(self, checkpoint: Checkpoint, weights: dict[str, mx.array], num_taps: int) -> None:
        super().__init__()
        qwen3 = family_module("qwen3")
        args = qwen3.ModelArgs.from_dict(_backbone(checkpoint))
        width, self.args = args.hidden_size, args
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        self.layers = [Layer(args, qwen3) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        if "embed_tokens.weight" in weights:
            self.embed_tokens = nn.Embedding(args.vocab_size, width)
        if "lm_head.weight" in weights:
            self.lm_head = nn.Linear(width, weights["lm_head.weight"].shape[0], bias=False)
        rank = 0
        if "markov_head.markov_w1.weight" in weights:
            rank = weights["markov_head.markov_w1.weight"].shape[-1]
            self.markov_head = nn.Module()
            self.markov_head.markov_w1 = nn.Embedding(args.vocab_size, rank)
            self.markov_head.markov_w2 = nn.Linear(
                rank, weights["markov_head.markov_w2.weight"].shape[0], bias=False
            )
        if "confidence_head.proj.weight" in weights:
            inputs = weights["confidence_head.proj.weight"].shape[-1]
            self.confidence_head = nn.Module()
            self.confidence_head.proj = nn.Linear(inputs, 1, bias="confidence_head.proj.bias" in weights)


def _backbone(checkpoint: Checkpoint) -> dict[str, Any]:
    """The layers' configuration, which speculators keeps apart."""
    config = dict(checkpoint.config.get("transformer_layer_config") or checkpoint.config)
    rope = config.get("rope_parameters") or {}
    usual = {
        "rope_theta": rope.get("rope_theta", 1e6),
        "max_position_embeddings": 1 << 17,
        "tie_word_embeddings": False,
    }
    return {**usual, **config, "model_type": "qwen3"}


class DSpark:
    """A `BlockGraph`."""

    kind = "dspark"
    foreign = (*FOREIGN, *_NEWER)  # in names of weights that this kind does not read

    def __init__(self, folder: Path, target: Target) -> None:
        read = Checkpoint.read(folder)
        settings = {**read.config, **(read.config.get("dflash_config") or {})}
        read = Checkpoint(folder, settings, read.weights)
        checkpoint = Checkpoint(folder, {**settings, **_backbone(read)}, read.weights)
        checkpoint.check(target)
        layers = (read.config.get("transformer_layer_config") or read.config).get("model_type")
        if layers not in _KNOWN or any(part in name for name in read.weights for part in self.foreign):
            raise ModelError(
                f"{folder} is a block drafter with layers of the kind {layers}, and mantou reads plain ones of Qwen3; "
                "choose another drafter."
            )
        named = settings.get("target_layer_ids") or settings.get("aux_hidden_state_layer_ids")
        if not named or "fc.weight" not in read.weights:
            raise ModelError(
                f"{folder} does not say which layers of its model it reads; this is no block drafter."
            )
        self.taps = tuple(int(place) for place in named)
        self.vocab_size, self.ids = target.vocab_size, draft_ids(checkpoint)
        self.block_size, self._mask_token = read.size("block_size"), int(settings.get("mask_token_id") or 0)
        self._first = _first_slot(read)
        weights = {n: w for n, w in read.weights.items() if not n.endswith(_SKIPPED)}
        self._module: Any = self._parts(checkpoint, weights)
        self._sights = sights(checkpoint, len(self._module.layers))
        checkpoint.load_into(self._module, weights)
        if self.ids is not None and "lm_head" not in self._module:
            self._module.lm_head = fewer_tokens(target, self.ids)
        sure = weights.get("confidence_head.proj.weight")
        self._sure_of_token = (
            sure is not None and sure.shape[-1] != target.hidden_size
        )  # and not of features alone
        args = self._module.args
        self.kv = own_rows(args.num_hidden_layers, args.num_key_value_heads, args.head_dim, target)
        finish(self._module, target)
        self._embed = self._module.get("embed_tokens", target.vocabulary.embed)
        self._project = self._module.get("lm_head", target.vocabulary.project)

    def _parts(self, checkpoint: Checkpoint, weights: dict[str, mx.array]) -> Parts:
        return Parts(checkpoint, weights, len(self.taps))

    @property
    def most(self) -> int:
        return self.block_size - self._first

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Takes hidden states into the context; what it returns says nothing."""
        module = self._module
        fused = module.hidden_norm(module.fc(hidden.astype(module.hidden_norm.weight.dtype)))
        for layer, cache in zip(module.layers, self.kv.caches, strict=True):
            layer.self_attn.remember(fused, cache)
        return fused

    def block(self, last: mx.array) -> mx.array:
        """int32[B, 1], each row's last known token -> [B, most, D]: what the guesses are made of."""
        tokens = mx.concatenate(
            [last, mx.full((last.shape[0], self.block_size - 1), self._mask_token, mx.int32)], axis=1
        )
        geometry = self.kv.geometry
        assert geometry is not None
        x = self._embedded(tokens)
        masks = self._masks(geometry.span, geometry.positions)
        for layer, mask, cache in zip(self._module.layers, masks, self.kv.caches, strict=True):
            x = layer(x, mask, cache)
        return self._module.norm(x)[:, self._first :]

    def _embedded(self, tokens: mx.array) -> mx.array:
        return self._embed(tokens)

    def _masks(self, span: int, positions: mx.array) -> Sequence[mx.array]:
        """What each layer sees of `span` columns from a block at `positions` int32[B, T]: bool[B, 1, 1 or T, span]."""
        columns = mx.arange(span, dtype=mx.int32)[None, None, None]
        places = positions[:, None, :, None]
        ahead, block = places[:, :, -1:], columns >= places[:, :, :1]
        masks: dict[Sight, mx.array] = {}
        for window, causal in set(self._sights):
            seen = columns <= (places if causal else ahead)
            masks[window, causal] = seen if window is None else seen & (block | (places - columns < window))
        return [masks[sight] for sight in self._sights]

    def logits(self, features: mx.array) -> mx.array:
        return self._project(features)

    def scores(self, features: mx.array, before: mx.array) -> mx.array:
        """[B, 1, D] and the token before each guess, int32[B, 1] -> what the guess is drawn from [B, 1, N]."""
        logits, bias = self.logits(features), self.bias(before)
        return logits if bias is None else logits + bias.astype(logits.dtype)

    def bias(self, before: mx.array) -> mx.array | None:
        """int32[B, 1], the token before a guess -> what that adds to its logits [B, 1, N]."""
        if "markov_head" not in self._module:
            return None
        head = self._module.markov_head
        return head.markov_w2(head.markov_w1(before))

    def confidence(self, features: mx.array, before: mx.array) -> mx.array | None:
        """[B, 1, D] and the token before -> how likely the guess is right [B, 1]; None if the head does not say."""
        if "confidence_head" not in self._module:
            return None
        if self._sure_of_token:
            known = self._module.markov_head.markov_w1(before)
            features = mx.concatenate([features, known.astype(features.dtype)], axis=-1)
        return mx.sigmoid(self._module.confidence_head.proj(features)[..., 0])


def sights(checkpoint: Checkpoint, num_layers: int) -> list[Sight]:
    """What each layer sees. `is_causal` (or `causal` of the dflash_config) speaks for all layers; speculators'
    `sliding_window_non_causal` for those with a window, which look back only where nothing is said: but speculators'
    DFlash means the opposite then."""
    config = checkpoint.config
    types = config.get("layer_types") or ["full_attention"] * num_layers
    if len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{checkpoint.folder}/config.json has layer_types that mantou does not know, or not one for each layer; "
            "choose another drafter."
        )
    of_all = next((config[name] for name in ("is_causal", "causal") if config.get(name) is not None), None)
    usual = str(config.get("speculators_model_type")).startswith("dflash")
    of_sliding = not config.get("sliding_window_non_causal", usual)
    return [
        (
            checkpoint.size("sliding_window") if slides else None,
            slides and of_sliding if of_all is None else bool(of_all),
        )
        for slides in (of == "sliding_attention" for of in types)
    ]


def _first_slot(checkpoint: Checkpoint) -> int:
    """The place in a block that guesses first: 0, or 1 where the known token's own place guesses nothing."""
    config = checkpoint.config
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    if methods and (count := methods[0].get("speculative_tokens")):
        return checkpoint.size("block_size") - count
    if "dflash_config" in config:
        return 1
    if "transformer_layer_config" in config:
        return int(not config.get("sample_from_anchor", False))
    return 0
