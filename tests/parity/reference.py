"""What mlx_lm and transformers make of a model folder: `python -m tests.parity.reference FOLDER OUT CASE...`.

Knows no mantou. It runs in a process of its own, because mantou's kernels replace parts of mlx_lm in theirs; stock MLX
uses one core, so several processes share the cases.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from tests.parity.cases import CONVERSATIONS, KV8, NUM_TOKENS


def greedy(model: Any, prompt: Sequence[int], cache: Any) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The prompt in one forward, then mlx_lm's own loop over `cache`.

    Returns NUM_TOKENS tokens, their log-probabilities, and the prompt's logits [T, V].
    """
    logits = model(mx.array([prompt]), cache=cache)[0]
    rows = [logits[-1] - mx.logsumexp(logits[-1])]
    tokens = [int(mx.argmax(rows[0]))]
    steps = generate_step(mx.array(tokens), model, max_tokens=NUM_TOKENS - 1, prompt_cache=cache)
    for token, logprobs in steps:
        tokens.append(int(token))
        rows.append(logprobs)
    chosen = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    return tokens, np.array(chosen, np.float32), np.array(logits)


def fingerprint(folder: Path) -> dict[str, str]:
    """Everything that an answer depends on: releases, the model's files, the conversations.

    Not mantou's note of where and when the folder was made, which no two machines share.
    """
    digest = hashlib.sha256(json.dumps([NUM_TOKENS, KV8, CONVERSATIONS]).encode())
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".safetensors", ".txt") and file.name != "mantou.json":
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    releases = {name: version(name) for name in ("mlx", "mlx-lm", "transformers")}
    return {**releases, "model and conversations": digest.hexdigest()}


def main(folder: str, out: str, *cases: str) -> None:
    """Writes CASE.json and CASE.npz into `out` for each case: a conversation's name, or `kv8`."""
    model, tokenizer = load(folder)
    for case in cases:
        conversation = CONVERSATIONS[KV8 if case == "kv8" else case]
        prompt = list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True))
        quantized = [QuantizedKVCache(group_size=64, bits=8) for _ in model.layers]
        tokens, logprobs, prefill = greedy(
            model, prompt, quantized if case == "kv8" else make_prompt_cache(model)
        )
        np.savez(Path(out) / f"{case}.npz", logprobs=logprobs, prefill=prefill)
        (Path(out) / f"{case}.json").write_text(json.dumps({"prompt": prompt, "tokens": tokens}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
