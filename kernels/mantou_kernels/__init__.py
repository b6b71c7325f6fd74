"""CPU primitives for MLX. Importing fails with ImportError when MLX is not the release that this was built for."""

from __future__ import annotations

import mlx.core as mx

from mantou_kernels._built_for import MLX

if mx.__version__ != MLX:
    raise ImportError(f"mantou_kernels was built for MLX {MLX} and this is {mx.__version__}; build it again")

from mantou_kernels._ext import (
    EncoderLayer,
    Layer,
    Packed,
    adapter_rows,
    amx,
    attention,
    draw,
    draws_like_mlx,
    embed,
    encoder,
    gate,
    gated_delta,
    gather_linear,
    highest_of_product,
    kv_write,
    layer_norm,
    layers,
    linear,
    linear_top,
    make_encoder_layer,
    make_layer,
    pack_affine,
    pack_dense,
    pack_rows,
    rms_norm,
    rope,
    runnable_kernels,
    select_kernels,
    set_threads,
    ssm,
    supported,
    threads,
    unpack_rows,
    usable_cpus,
)

__all__ = [
    "EncoderLayer",
    "Layer",
    "Packed",
    "adapter_rows",
    "amx",
    "attention",
    "draw",
    "draws_like_mlx",
    "embed",
    "encoder",
    "gate",
    "gated_delta",
    "gather_linear",
    "highest_of_product",
    "kv_write",
    "layer_norm",
    "layers",
    "linear",
    "linear_top",
    "make_encoder_layer",
    "make_layer",
    "pack_affine",
    "pack_dense",
    "pack_rows",
    "rms_norm",
    "rope",
    "runnable_kernels",
    "select_kernels",
    "set_threads",
    "ssm",
    "supported",
    "threads",
    "unpack_rows",
    "usable_cpus",
]
