"""A one-layer head that continues a model's hidden states, and how it is trained. Knows arrays, no text.

Position i takes the token t[i+1] and the hidden state h[i] that drew it, and gives an estimate of h[i+1], which draws
t[i+2]. Drafting feeds the head its own estimates, so it is trained like that too: round k begins from the estimates of
round k-1, while attention sees the earlier positions as a draft of k tokens would: true ones first, then its own.
After Li et al., EAGLE (2024) and EAGLE-3 (2025), section on training-time test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Params = dict[str, mx.array]
_LAYER = "layers.0."


@dataclass(frozen=True)
class Shape:
    """Sizes of the head: those of the model that it helps."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    vocab: int

    @classmethod
    def of(cls, args: Any) -> Shape:
        return cls(
            args.hidden_size,
            args.intermediate_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim or args.hidden_size // args.num_attention_heads,
            args.rms_norm_eps,
            args.rope_theta,
            args.vocab_size,
        )

    def config(self, draft_vocab: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "draft_vocab_size": draft_vocab,
            "torch_dtype": "bfloat16",
        }


def initial(module: Any, shape: Shape, hidden_rms: float, seed: int) -> Params:
    """A layer that adds little at first, behind a mix whose outcome is the hidden state that came in."""
    embedding = module.model.embed_tokens.weight[:4096].astype(mx.float32)
    embedding_rms = float(mx.sqrt(mx.mean(embedding**2)))
    norm = module.model.norm.weight.astype(mx.float32)
    keys = iter(mx.random.split(mx.random.key(seed), 16))

    def normal(rows: int, columns: int, scale: float) -> mx.array:
        return mx.random.normal((rows, columns), key=next(keys)) * (scale * columns**-0.5)

    width, inner = shape.width, shape.inner
    queries, pairs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # The last norm multiplies by its weight: what is to come out of it goes in without.
    unweighted = mx.where(mx.abs(norm) > 1e-3, 1 / norm, 0.0) / hidden_rms
    return {
        "fc.weight": mx.concatenate(
            [normal(width, width, 0.5) / embedding_rms, mx.diag(unweighted) + normal(width, width, 0.1)],
            axis=1,
        ),
        f"{_LAYER}input_layernorm.weight": mx.ones(width),
        f"{_LAYER}self_attn.q_proj.weight": normal(queries, width, 1.0),
        f"{_LAYER}self_attn.k_proj.weight": normal(pairs, width, 1.0),
        f"{_LAYER}self_attn.v_proj.weight": normal(pairs, width, 1.0),
        f"{_LAYER}self_attn.o_proj.weight": normal(width, queries, 0.3),
        f"{_LAYER}post_attention_layernorm.weight": mx.ones(width),
        f"{_LAYER}mlp.gate_proj.weight": normal(inner, width, 1.0),
        f"{_LAYER}mlp.up_proj.weight": normal(inner, width, 1.0),
        f"{_LAYER}mlp.down_proj.weight": normal(width, inner, 0.3),
        "norm.weight": norm,
    }


class Head:
    """The forward of a whole batch, round by round."""

    def __init__(self, shape: Shape, length: int, embedding: mx.array, vocabulary: mx.array) -> None:
        self.shape = shape
        self.length = length
        self._embedding = embedding  # [V, D], of all tokens that may come in
        self._vocabulary = vocabulary  # [Vd, D], of those that may come out

    def _linear(self, params: Params, name: str, x: mx.array) -> mx.array:
        return x @ params[name].astype(x.dtype).T

    def _norm(self, params: Params, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, params[name].astype(x.dtype), self.shape.eps)

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self.shape.head_dim).transpose(0, 2, 1, 3)

    def _turn(self, x: mx.array) -> mx.array:
        s = self.shape
        return mx.fast.rope(x, s.head_dim, traditional=False, base=s.rope_theta, scale=1.0, offset=0)

    def rounds(self, params: Params, tokens: mx.array, hidden: mx.array, num_rounds: int) -> list[mx.array]:
        """Estimates of h[1:] after each round. tokens[B, T + 1] and hidden[B, T + 1] are the model's own."""
        known = mx.take(self._embedding, tokens[:, 1:], axis=0)
        keys: list[mx.array] = []
        values: list[mx.array] = []
        estimates: list[mx.array] = []
        source = hidden[:, :-1]
        for _ in range(num_rounds):
            if estimates:  # position i goes on from the estimate of the position before
                source = _later(estimates[-1], 1)
            x = self._linear(params, "fc.weight", mx.concatenate([known, source.astype(known.dtype)], -1))
            y = self._norm(params, f"{_LAYER}input_layernorm.weight", x)
            x = x + self._attention(params, y, keys, values)
            y = self._norm(params, f"{_LAYER}post_attention_layernorm.weight", x)
            gate = self._linear(params, f"{_LAYER}mlp.gate_proj.weight", y)
            up = self._linear(params, f"{_LAYER}mlp.up_proj.weight", y)
            x = x + self._linear(params, f"{_LAYER}mlp.down_proj.weight", gate * mx.sigmoid(gate) * up)
            estimates.append(self._norm(params, "norm.weight", x))
        return estimates

    def _attention(
        self, params: Params, y: mx.array, keys: list[mx.array], values: list[mx.array]
    ) -> mx.array:
        """Round k (from 1) sees round 1 up to position i - k + 1, then one position of each later round."""
        s, name = self.shape, f"{_LAYER}self_attn."
        share = s.heads // s.kv_heads
        q = self._turn(self._split(self._linear(params, f"{name}q_proj.weight", y), s.heads))
        k = self._turn(self._split(self._linear(params, f"{name}k_proj.weight", y), s.kv_heads))
        v = self._split(self._linear(params, f"{name}v_proj.weight", y), s.kv_heads)
        keys.append(mx.repeat(k, share, axis=1))
        values.append(mx.repeat(v, share, axis=1))
        scale = s.head_dim**-0.5
        late = len(keys) - 1
        length = q.shape[2]
        at = mx.arange(length)
        hidden_from = mx.where(at[None, :] <= at[:, None] - late, 0.0, -1e9).astype(q.dtype)
        q = q * scale
        scores = [q @ keys[0].transpose(0, 1, 3, 2) + hidden_from]
        scores += [
            mx.sum(q * _later(keys[i], late - i, axis=2), axis=-1, keepdims=True) for i in range(1, late + 1)
        ]
        every = mx.concatenate(scores, axis=-1) if late else scores[0]
        weights = mx.softmax(every, axis=-1, precise=True)
        out = weights[..., :length] @ values[0]
        for i in range(1, late + 1):
            out = out + weights[..., length + i - 1 : length + i] * _later(values[i], late - i, axis=2)
        out = out.transpose(0, 2, 1, 3).reshape(*y.shape[:2], -1)
        return self._linear(params, f"{name}o_proj.weight", out)

    def towards(self, truth: mx.array, hard: float) -> mx.array:
        """What the likeliest token (`hard` of it) and all tokens by their chances weigh, as a vector of the head."""
        wanted = self.logits(truth)
        best = mx.argmax(wanted, axis=-1).astype(mx.int32)
        every = mx.softmax(wanted, axis=-1).astype(truth.dtype) @ self._vocabulary
        return hard * mx.take(self._vocabulary, best, axis=0) + (1 - hard) * every

    def logits(self, estimate: mx.array) -> mx.array:
        return (estimate @ self._vocabulary.T).astype(mx.float32)


def _later(x: mx.array, steps: int, axis: int = 1) -> mx.array:
    """x moved to later positions; what stands at the first ones counts for nothing."""
    if not steps:
        return x
    if axis == 1:
        return mx.concatenate([x[:, :steps], x[:, :-steps]], axis=1)
    return mx.concatenate([x[:, :, :steps], x[:, :, :-steps]], axis=2)


@dataclass(frozen=True)
class Weights:
    """What counts how much."""

    hard: float = 0.5  # the likeliest token; the rest is the model's whole distribution
    hidden: float = 0.1  # smooth L1 of the estimates
    fade: float = 0.85  # of each further round


def loss(
    params: Params,
    head: Head,
    tokens: mx.array,
    hidden: mx.array,
    answers: mx.array,
    hidden_rms: float,
    num_rounds: int,
    weights: Weights,
) -> mx.array:
    """Cross-entropy to the likeliest token and to the model's distribution, and smooth L1 of the hidden states.

    Position i counts if the model drew t[i+2] itself. With fixed rows W of the vocabulary, sum_v p_v (e . W_v) is
    e . (p W): so only the normaliser of a round needs an array as wide as the vocabulary, and nothing is gathered or
    scattered behind the gradient (a GPU compiles each kind of those anew).
    """
    truth = hidden[:, 1:]
    counts = mx.concatenate([answers[:, 2:], mx.zeros_like(answers[:, :1])], 1).astype(mx.float32)
    towards = mx.stop_gradient(head.towards(truth, weights.hard))
    total = mx.array(0.0)
    for k, estimate in enumerate(head.rounds(params, tokens, hidden, num_rounds)):
        share = counts * (mx.arange(counts.shape[1]) >= k)
        share = share / mx.maximum(share.sum(), 1)
        norm = mx.logsumexp(head.logits(estimate), axis=-1)
        entropy = norm - mx.sum((estimate * towards).astype(mx.float32), axis=-1)
        far = mx.abs((estimate - truth).astype(mx.float32)) * (1 / hidden_rms)
        far = mx.mean(mx.where(far < 1, 0.5 * far * far, far - 0.5), axis=-1)
        total = total + weights.fade**k * mx.sum((entropy + weights.hidden * far) * share)
    return total


def acceptance(
    params: Params,
    head: Head,
    d2t: mx.array,
    tokens: mx.array,
    hidden: mx.array,
    answers: mx.array,
    num_rounds: int,
) -> tuple[list[float], list[int]]:
    """Of drafts that were right so far, the share whose next token is right; and how many those were."""
    kept = np.array(mx.concatenate([answers[:, 2:], mx.zeros_like(answers[:, :1])], 1))
    actual = mx.concatenate([tokens[:, 2:], mx.full(tokens[:, :1].shape, -1, tokens.dtype)], 1)
    right = []
    for estimate in head.rounds(params, tokens, hidden, num_rounds):
        guess = mx.take(d2t, mx.argmax(head.logits(estimate), axis=-1), axis=0)
        right.append(np.array(guess == actual))
    rates, numbers = [], []
    alive = kept
    for k, found in enumerate(right):
        if k:  # the draft that began a position earlier
            alive = np.pad(alive & right[k - 1], ((0, 0), (1, 0)))[:, :-1] & kept
        numbers.append(int(alive.sum()))
        rates.append(float((found & alive).sum() / max(alive.sum(), 1)))
    return rates, numbers


def save(
    folder: Path,
    params: Mapping[str, mx.array],
    shape: Shape,
    draft_ids: mx.array,
    facts: Mapping[str, Any],
    bits: int = 0,
) -> None:
    """A checkpoint in the layout of public EAGLE heads. `d2t` counts from the draft id, as in EAGLE-3.

    With `bits` its matrices are packed in groups of 64, as mlx-lm's converter does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config(draft_ids.size)
    arrays = {name: value.astype(mx.bfloat16) for name, value in params.items()}
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
        for name in [name for name, value in arrays.items() if value.ndim == 2]:
            stem = name.removesuffix(".weight")
            packed = mx.quantize(arrays.pop(name), 64, bits)
            arrays |= dict(zip((f"{stem}.weight", f"{stem}.scales", f"{stem}.biases"), packed, strict=True))
    arrays["d2t"] = draft_ids - mx.arange(draft_ids.size)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (folder / "distilled.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
