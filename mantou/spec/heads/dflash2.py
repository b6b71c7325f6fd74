"""DFlash 2 drafters: DFlash whose places mix with those before them, and whose guesses go by the guess before.

Layout of the public checkpoints (z-lab's; vLLM's speculators name the same tensors). In every layer attention and MLP
stand between two short causal convolutions over the block, which the context does not pass. `base_kernel` [2, taps, D]
holds both; `kernel_projection` adds to them, for every place and each `conv_group_size` channels, what it makes of the
part's input. `candidate_selector` orders the `selector_top_k` likeliest tokens of a place: to a logit it adds a product
over `selector_rank` numbers, of the guess before (`predecessor_codebook`), the candidate (`successor_codebook`) and the
place's features. What layers see is DFlash's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.models.load import family_module
from mantou.spec.heads.dspark import FOREIGN, DSpark, Layer, Parts
from mantou.spec.heads.parts import Checkpoint, Target

_CODEBOOKS = ("predecessor_codebook", "successor_codebook")


class _Conv(nn.Module):
    """The convolutions before and after a part of a layer, over a block [B, T, D]."""

    def __init__(self, width: int, taps: int, group_size: int) -> None:
        super().__init__()
        self._sizes = (2, taps, width // group_size)
        self.base_kernel: mx.array = mx.zeros((2, taps, width))
        self.kernel_projection: Any = nn.Linear(width, 2 * taps * (width // group_size), bias=False)

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """What goes into the part, and the kernels [B, T, 2, taps, groups] of both sides."""
        kernels = self.kernel_projection(x).reshape(*x.shape[:2], *self._sizes)
        return self._mix(x, kernels, 0), kernels

    def after(self, x: mx.array, kernels: mx.array) -> mx.array:
        return self._mix(x, kernels, 1)

    def _mix(self, x: mx.array, kernels: mx.array, side: int) -> mx.array:
        _, taps, groups = self._sizes
        length = x.shape[1]
        places = x.reshape(*x.shape[:2], groups, -1)
        base = self.base_kernel[side].reshape(taps, groups, -1)
        mixed = (base[0] + kernels[:, :, side, 0, :, None]) * places
        for tap in range(1, taps):  # nothing stands before the block's first place
            earlier = mx.pad(places[:, : length - tap], [(0, 0), (tap, 0), (0, 0), (0, 0)])
            mixed = mixed + (base[tap] + kernels[:, :, side, tap, :, None]) * earlier
        return mixed.reshape(x.shape)


class _Layer(Layer):
    def __init__(self, args: Any, qwen3: Any, taps: int, group_size: int) -> None:
        super().__init__(args, qwen3)
        self.attention_conv = _Conv(args.hidden_size, taps, group_size)
        self.mlp_conv = _Conv(args.hidden_size, taps, group_size)

    def __call__(self, x: mx.array, mask: mx.array, cache: Any) -> mx.array:
        mixed, kernels = self.attention_conv.before(self.input_layernorm(x))
        x = x + self.attention_conv.after(self.self_attn(mixed, mask, cache), kernels)
        mixed, kernels = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(mixed), kernels)


class _Selector(nn.Module):
    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook: Any = nn.Embedding(vocab_size, rank)
        self.successor_codebook: Any = nn.Embedding(vocab_size, rank)
        self.hidden_projection: Any = nn.Linear(width, rank, bias=False)

    def __call__(self, features: mx.array, before: mx.array, candidates: mx.array) -> mx.array:
        """[B, 1, D], int32[B, 1], int32[B, 1, K] -> what it adds to the candidates' logits [B, 1, K]."""
        wanted = self.predecessor_codebook(before) * self.hidden_projection(features)
        return mx.sum(wanted[:, :, None] * self.successor_codebook(candidates), axis=-1)


class DFlash2(DSpark):
    """A `BlockGraph`."""

    kind = "dflash2"
    foreign = FOREIGN

    def __init__(self, folder: Path, target: Target) -> None:
        super().__init__(folder, target)
        self._first = 1  # whatever the packaging, the known token's own place guesses nothing
        if self.ids is not None:
            raise ModelError(
                f"{folder} guesses among fewer tokens than its model has, as no DFlash 2 drafter does; get it anew."
            )

    def _parts(self, checkpoint: Checkpoint, weights: dict[str, mx.array]) -> Parts:
        for name in _CODEBOOKS:  # plain arrays, where they come from the publisher
            plain = weights.pop(f"candidate_selector.{name}", None)
            if plain is not None:
                weights[f"candidate_selector.{name}.weight"] = plain
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        taps, group_size, rank, self._top_k = (checkpoint.size(name) for name in names)
        if False in (checkpoint.config.get(f"{of}is_neox_style", True) for of in ("", "rope_")):
            raise ModelError(
                f"{checkpoint.folder} rotates neighbouring channels, which mantou's DFlash 2 does not; "
                "choose another drafter."
            )
        width, vocab_size = checkpoint.size("hidden_size"), checkpoint.size("vocab_size")
        if width % group_size or taps > self.block_size or self._top_k > vocab_size:
            raise ModelError(
                f"{checkpoint.folder}/config.json has convolutions of {taps} places in groups of {group_size} channels "
                f"and {self._top_k} candidates, which do not fit blocks of {self.block_size} places, {width} channels "
                f"and {vocab_size} tokens; get it anew."
            )
        module: Any = Parts(checkpoint, weights, len(self.taps))
        qwen3 = family_module("qwen3")
        module.layers = [_Layer(module.args, qwen3, taps, group_size) for _ in module.layers]
        module.candidate_selector = _Selector(vocab_size, width, rank)
        config = checkpoint.config
        self._input_scale = float(config.get("input_embedding_scale") or 1.0)
        self._output_scale = float(config.get("output_multiplier") or 1.0)
        self._softcap = float(config.get("final_logit_softcapping") or 0.0)
        return module

    def _embedded(self, tokens: mx.array) -> mx.array:
        return self._input_scale * super()._embedded(tokens)

    def logits(self, features: mx.array) -> mx.array:
        logits = self._output_scale * super().logits(features).astype(mx.float32)
        return self._softcap * mx.tanh(logits / self._softcap) if self._softcap else logits

    def scores(self, features: mx.array, before: mx.array) -> mx.array:
        logits = self.logits(features)
        best = mx.argpartition(logits, -self._top_k, axis=-1)[..., -self._top_k :]
        added = self._module.candidate_selector(features, before, best)
        found = mx.take_along_axis(logits, best, axis=-1) + added.astype(logits.dtype)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), best, found, axis=-1)
