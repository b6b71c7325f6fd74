"""Builds hub caches on disk for the tests: blobs, snapshots of links, refs, as huggingface_hub lays them out."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "quantization": {"group_size": 32, "bits": 4, "mode": "affine"},
}


def weights(rows: int = 8) -> bytes:
    """A packed matrix of `rows` x 64 at 4 bits in groups of 32, and a norm of 64."""
    tensors = {
        "a.weight": np.zeros((rows, 8), np.uint32),
        "a.scales": np.zeros((rows, 2), np.float32),
        "a.biases": np.zeros((rows, 2), np.float32),
        "norm.weight": np.zeros(64, np.float32),
    }
    return save(tensors)


def model_files(**config: object) -> dict[str, bytes]:
    """The files of a small whole model; `config` changes its config.json."""
    return {"config.json": json.dumps({**CONFIG, **config}).encode(), "model.safetensors": weights()}


def add_snapshot(
    hub: Path, repo_id: str, commit: str, files: dict[str, bytes], *refs: str, at: int = 1
) -> Path:
    """A snapshot whose files are links to blobs, with the refs that point to it; `at` is its time of change."""
    repo = hub / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    for name, data in files.items():
        blob = repo / "blobs" / hashlib.sha1(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    for ref in refs:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    os.utime(snapshot, (at, at))
    return snapshot
