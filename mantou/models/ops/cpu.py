"""The CPU implementation of a graph's building blocks, on the C++ kernels. Knows no requests and no KV."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ConfigError
from mantou.models.ops import openblas
from mantou.models.ops.plain import PlainOps
from mantou.protocols import DeviceOps

_PLANES = {"exact": 2, "int8": 1}  # int8 planes of an activation


def cpu_ops(
    *, threads: int | None = None, activations: str = "exact", environ: Mapping[str, str] = os.environ
) -> DeviceOps:
    """The kernels if they can be trusted, else plain MLX with a note. MANTOU_CPU_KERNELS=0 asks for plain MLX."""
    if activations not in _PLANES:
        raise ConfigError(f"--cpu-activations takes exact or int8, not {activations!r}.")
    if environ.get("MANTOU_CPU_KERNELS", "1") == "0":
        return PlainOps(f"CPU kernels are off (MANTOU_CPU_KERNELS=0): {_plain()}")
    reason = unusable()
    if reason is not None:
        return PlainOps(f"CPU kernels are not in use ({reason}): {_plain()}")
    return CpuOps(threads=threads, planes=_PLANES[activations])


def _plain() -> str:
    library = openblas.in_force()
    return f"plain MLX, float products on OpenBLAS ({library})" if library else "plain MLX, slow"


_verdict: list[str | None] = []  # of this process; filled once


def unusable() -> str | None:
    """Why the kernels cannot be used in this process, or None. Imports and tests them on the first call."""
    if not _verdict:
        _verdict.append(_examine())
    return _verdict[0]


def _examine() -> str | None:
    try:
        kernels = importlib.import_module("mantou_kernels")
    except ImportError as error:
        if getattr(error, "name", None) == "mantou_kernels":
            return "the package mantou-kernels is not installed; `pip install ./kernels` builds it"
        return str(error)  # another MLX, or a library that does not load
    if not kernels.supported():
        return "this CPU has neither AVX2 nor NEON dot products"
    from mantou.models.ops.self_test import self_test

    try:
        failure = self_test()
    except TypeError:  # functions that take other arguments
        return "the package mantou-kernels is of another version; `pip install ./kernels` builds it"
    return f"self-test failed: {failure}" if failure else None


class CpuOps:
    """Replaces linear layers, embeddings, expert stacks and the mx.fast entry points of a loaded graph."""

    name = "cpu"
    reads_blocks = True
    compiles = False
    packs: bool | None = (
        True  # rounding costs a drafted guess now and then, reading four times the bytes costs more
    )

    def __init__(self, *, threads: int | None = None, planes: int = 2) -> None:
        from mantou.models.ops.extension import kernels

        self._planes = planes
        kernels.set_threads(threads or kernels.usable_cpus())

    def install(self, model: Any) -> Sequence[str]:
        """Packs the weights module by module, dropping each original: the peak is one module above the model."""
        from mantou.models.ops import fast
        from mantou.models.ops.encoder_layers import fuse_encoder_layers
        from mantou.models.ops.extension import kernels

        fast.patch_mx_fast()
        fast.patch_mlx_lm()
        num_fused = self._fuse(model)
        _replace_gelu(model)
        left = [path for path, parent, key in _weighted(model) if not self._replace(parent, key)]
        num_fused += fuse_encoder_layers(model)
        mode = "" if self._planes == 2 else ", 8-bit activations"
        fused = f", {num_fused} fused layers" if num_fused else ""
        notes = [f"CPU kernels: {kernels.select_kernels()}, {kernels.threads()} threads{fused}{mode}"]
        if kernels.amx() not in ("works", "absent"):
            notes.append(f"AMX is not in use: {kernels.amx()}")
        if left:
            notes.append(f"{len(left)} layers stay on plain MLX, slow (first: {left[0]})")
        return notes

    def write_rows(
        self,
        buffer: mx.array,
        rows: mx.array,
        start: mx.array,
        count: mx.array | None,
        first_slot: int,
        ring: int,
        table: mx.array | None = None,
        block: int = 0,
    ) -> mx.array:
        from mantou.models.ops.extension import kernels

        where = {"first_slot": first_slot, "ring": ring, "table": table, "block": block}
        return kernels.kv_write(buffer, rows, start, count, **where)

    def read_blocks(
        self,
        q: mx.array,
        pools: tuple[Sequence[mx.array], Sequence[mx.array]],
        table: mx.array,
        block: int,
        span: int,
        *,
        bits: int,
        group: int,
        scale: float,
        mask: str | mx.array | None = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array | None:
        from mantou.models.ops.extension import kernels

        keys, values = pools
        if options or q.dtype != keys[-1].dtype or (isinstance(mask, str) and mask not in ("", "causal")):
            return None
        return kernels.attention(
            q,
            keys[0],
            values[0],
            scale=scale,
            causal=isinstance(mask, str) and mask == "causal",
            mask=mask if isinstance(mask, mx.array) else None,
            sinks=sinks,
            groups=[*keys[1:], *values[1:]],
            bits=bits,
            group=group,
            table=table,
            block=block,
            columns=span,
        )

    def records(self, shape: Any, codec: Any) -> None:
        return None

    def draw(
        self, logits: mx.array, params: Any, positions: mx.array | None, allowed: mx.array | None
    ) -> Sequence[mx.array] | None:
        """All stages but XTC and the tone curve (rare, and a softmax of their own)."""
        from mantou.models.ops.extension import kernels

        num_top = params.max_logprobs
        if not params.any_sampled and num_top < 0:
            highest = kernels.highest_of_product(logits, allowed)
            if highest is not None:
                return highest
        if not kernels.draws_like_mlx or params.any_xtc or params.any_curve or num_top > logits.shape[-1]:
            return None
        if positions is None:  # nothing is sampled
            positions = mx.zeros(logits.shape[:2], mx.uint32)
        return kernels.draw(
            logits,
            sampled=params.sampled,
            inverse_temperature=params.inverse_temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p_log=params.min_p_log,
            seed_words=params.words,
            positions=positions,
            num_top=num_top,
            allowed=allowed,
            count=None if params.num_draws is None else mx.array(params.num_draws, mx.int32),
        )

    def _fuse(self, model: Any) -> int:
        """Packs gated MLPs, then fuses whole layers. Returns how many layers became one primitive."""
        from mantou.models.ops.fused import FusedLayer, fuse, fuse_mlp, link

        for _, module in model.named_modules():
            for name, child in module.children().items():
                packed = fuse_mlp(child, self._planes) if isinstance(child, nn.Module) else None
                if packed is not None:
                    module[name] = packed
        num_fused, linked = 0, []
        for container, index in list(_blocks(model)):
            layer = fuse(container[index], self._planes)
            if layer is None:
                continue
            before = container[index - 1] if index else None
            if isinstance(before, FusedLayer):
                linked.append(before)
            container[index] = layer
            num_fused += 1
        link(model, linked)
        return num_fused

    def _replace(self, parent: Any, key: Any) -> bool:
        from mantou.models.ops import modules

        module = parent[key]
        if not modules.is_packable(module):
            return False
        (packed,) = modules.pack([module])
        packed_class = {
            "linear": modules.PackedLinear,
            "embedding": modules.PackedEmbedding,
            "experts": modules.PackedExperts,
        }
        parent[key] = packed_class[_kind(module)](module, packed, self._planes)
        return True


def _replace_gelu(model: nn.Module) -> None:
    from mantou.models.ops import modules

    for _, module in model.named_modules():
        for name, child in module.children().items():
            if type(child) is nn.GELU and getattr(child, "_approx", None) == "none":
                module[name] = modules.KernelGelu()


def _kind(module: Any) -> str:
    """linear, embedding or experts for exactly the classes whose forward we know, "" for all others."""
    known = {
        nn.Linear: "linear",
        nn.QuantizedLinear: "linear",
        nn.Embedding: "embedding",
        nn.QuantizedEmbedding: "embedding",
    }
    if type(module) in known:
        return known[type(module)]
    home = type(module).__module__, type(module).__name__
    experts = ("mlx_lm.models.switch_layers", ("SwitchLinear", "QuantizedSwitchLinear"))
    return "experts" if home[0] == experts[0] and home[1] in experts[1] else ""


def _blocks(model: nn.Module) -> Iterator[tuple[list[Any], int]]:
    """(list, index) of every member of a module list that has attention and an MLP."""
    for _, module in model.named_modules():
        for child in module.values():
            if not isinstance(child, list):
                continue
            for index, block in enumerate(child):
                if isinstance(block, nn.Module) and {"self_attn", "mlp"} <= block.children().keys():
                    yield child, index


def _weighted(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(path, container, key) of every module of a known kind, each found before anything is replaced."""
    found: list[tuple[str, Any, Any]] = []

    def walk(path: str, container: Any) -> None:
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            inner = f"{path}.{key}" if path else str(key)
            if isinstance(value, nn.Module) and _kind(value):
                found.append((inner, container, key))
            elif isinstance(value, dict | list | tuple):
                walk(inner, value)

    walk("", model)
    yield from found
