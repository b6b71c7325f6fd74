"""Writes small GGUF files for the tests, and states ggml's dequantisation one value at a time."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
BLOCK = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34), BF16: (1, 2)}
HIDDEN, FF, HEADS, KV_HEADS = 64, 96, 4, 2


@dataclass
class Gguf:
    """What goes into a file: metadata values as Python objects, tensors as (shape, type, bytes)."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        head += b"".join(_text(key) + _value(value) for key, value in self.metadata.items())
        body = b""
        for name, (shape, kind, data) in self.tensors.items():
            body += b"\0" * (-len(body) % 32)
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            head += _text(name) + dims + struct.pack("<IQ", kind, len(body))
            body += data
        return head + b"\0" * (-len(head) % 32) + body


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    items = [_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


# ------------------------------------------------------------------ tensors
def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: int) -> bytes:
    """Bytes of a tensor with every quantised code and finite scales of any size and sign."""
    per_block, size = BLOCK[kind]
    num = int(np.prod(shape)) // per_block
    if kind in (F32, F16):
        values = rng.standard_normal(num) * 0.1
        return values.astype(np.float32 if kind == F32 else np.float16).tobytes()
    if kind == BF16:
        return (rng.standard_normal(num).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    blocks = rng.integers(0, 256, (num, size), dtype=np.uint8)
    scales = (rng.standard_normal((num, 2 if kind == Q4_1 else 1)) * 0.02).astype(np.float16)
    blocks[:, : scales.shape[1] * 2] = scales.view(np.uint8)
    return blocks.tobytes()


def formula(data: bytes, shape: tuple[int, ...], kind: int) -> np.ndarray:
    """The values of a tensor, straight from ggml's definition of each type (ggml-quants.c), in float32."""
    size = BLOCK[kind][1]
    out: list[np.float32] = []
    for at in range(0, len(data), size):
        block = data[at : at + size]
        half = [np.float32(np.frombuffer(block[i : i + 2], np.float16)[0]) for i in range(0, min(size, 4), 2)]
        if kind == F32:
            out.append(np.frombuffer(block, np.float32)[0])
        elif kind == F16:
            out.append(half[0])
        elif kind == BF16:
            out.append(np.frombuffer(b"\0\0" + block, np.float32)[0])
        elif kind == Q8_0:
            out += [half[0] * np.float32(int.from_bytes(block[i : i + 1], signed=True)) for i in range(2, 34)]
        else:
            codes = block[2:] if kind == Q4_0 else block[4:]
            quants = [code & 15 for code in codes] + [code >> 4 for code in codes]
            if kind == Q4_0:
                out += [half[0] * np.float32(quant - 8) for quant in quants]
            else:
                out += [half[0] * np.float32(quant) + half[1] for quant in quants]
    return np.array(out, np.float32).reshape(shape)


# ------------------------------------------------------------------ a tiny model
BYTE_TOKENS = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level names; \u0120 is a space
MERGES = ["h e", "l l", "he ll", "\u0120 w"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tiny_model(arch: str = "llama", kind: int = Q4_1, seed: int = 0) -> Gguf:
    """A whole model file of an architecture, every matrix of type `kind`, with a byte-level tokenizer."""
    tokens = [*SPECIALS, *BYTE_TOKENS, *(rule.replace(" ", "") for rule in MERGES)]
    tokens += [f"[PAD{i}]" for i in range(128 - len(tokens))]
    rng = np.random.default_rng(seed)
    head = HIDDEN // HEADS
    num_layers = 6 if arch == "gemma3" else 2  # its graph needs one layer of full attention
    gguf = Gguf()
    gguf.metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": num_layers,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FF,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.sliding_window": 32,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }

    def add(name: str, *shape: int, of: int = kind) -> None:
        gguf.tensors[name] = (shape, of, random_blocks(rng, shape, of))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN, of=F32)
    for layer in range(num_layers):
        at = f"blk.{layer}."
        for part, rows, columns in (
            ("attn_q", HEADS * head, HIDDEN),
            ("attn_k", KV_HEADS * head, HIDDEN),
            ("attn_v", KV_HEADS * head, HIDDEN),
            ("attn_output", HIDDEN, HEADS * head),
            ("ffn_gate", FF, HIDDEN),
            ("ffn_up", FF, HIDDEN),
            ("ffn_down", HIDDEN, FF),
        ):
            add(f"{at}{part}.weight", rows, columns)
            if arch == "qwen2" and part in ("attn_q", "attn_k", "attn_v"):
                add(f"{at}{part}.bias", rows, of=F32)
        norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
        if arch in ("qwen3", "gemma3"):
            norms |= {"attn_q_norm": head, "attn_k_norm": head}
        if arch == "gemma3":
            norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
        for part, width in norms.items():
            add(f"{at}{part}.weight", width, of=F32)
    return gguf
