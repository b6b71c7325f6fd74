"""`python -m tests.bench.random_gguf`: a Llama-shaped GGUF of random 4-bit weights, for speed alone.

mantou and llama.cpp then run the same bytes. The tokenizer is copied from another GGUF. Needs the package `gguf`, which
mantou itself does not. Knows no servers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "1b": Shape(2048, 8192, 16, 32, 8, 64),  # of Llama 3.2 1B
    "3b": Shape(3072, 8192, 28, 24, 8, 128),  # of Llama 3.2 3B
}


def matrices(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of a layer's matrices."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "attn_q", wide, shape.hidden
    yield "attn_k", narrow, shape.hidden
    yield "attn_v", narrow, shape.hidden
    yield "attn_output", shape.hidden, wide
    yield "ffn_gate", shape.inner, shape.hidden
    yield "ffn_up", shape.inner, shape.hidden
    yield "ffn_down", shape.hidden, shape.inner


def q4_0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random Q4_0 blocks: a float16 scale and 16 bytes for 32 weights, which have variance 1 / columns."""
    blocks = np.empty((rows, columns // 32, 18), np.uint8)
    blocks[..., 2:] = np.frombuffer(rng.bytes(rows * columns // 2), np.uint8).reshape(rows, -1, 16)
    spread = rng.uniform(0.8, 1.2, (rows, columns // 32, 1)) / (4.6 * columns**0.5)
    blocks[..., :2] = spread.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def copy_tokenizer(writer: Any, source: Path) -> int:
    """Copies every tokenizer.* field; returns the size of the vocabulary."""
    from gguf import GGUFReader, GGUFValueType

    size = 0
    for name, field in GGUFReader(source).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value = field.contents()
        if field.types[0] == GGUFValueType.ARRAY:
            size = len(value) if name == "tokenizer.ggml.tokens" else size
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    return size


def write(path: Path, shape: Shape, tokenizer: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    vocabulary = copy_tokenizer(writer, tokenizer)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, q4_0(rng, rows, columns), raw_dtype=GGMLQuantizationType.Q4_0)

    def add_norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))

    add("token_embd.weight", vocabulary, shape.hidden)
    add_norm("output_norm.weight")
    for layer in range(shape.layers):
        add_norm(f"blk.{layer}.attn_norm.weight")
        add_norm(f"blk.{layer}.ffn_norm.weight")
        for name, rows, columns in matrices(shape):
            add(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF whose tokenizer is copied")
    args = parser.parse_args()
    write(args.output, SHAPES[args.shape], args.tokenizer)


if __name__ == "__main__":
    main()
