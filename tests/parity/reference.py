"""What mlx_lm and transformers make of a model folder: `python -m tests.parity.reference FOLDER OUT`. Knows no mantou.

It runs in a process of its own, because mantou's kernels replace parts of mlx_lm in theirs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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


def main(folder: str, out: str) -> None:
    model, tokenizer = load(folder)
    lists: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, conversation in CONVERSATIONS.items():
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        run = greedy(model, prompt, make_prompt_cache(model))
        tokens, arrays[f"{name}/logprobs"], arrays[f"{name}/prefill"] = run
        lists[name] = {"prompt": list(prompt), "tokens": tokens}
    quantized = [QuantizedKVCache(group_size=64, bits=8) for _ in model.layers]
    run = greedy(model, lists[KV8]["prompt"], quantized)
    tokens, arrays["kv8/logprobs"], arrays["kv8/prefill"] = run
    lists["kv8"] = {"prompt": lists[KV8]["prompt"], "tokens": tokens}
    np.savez(Path(out) / "arrays.npz", **arrays)
    (Path(out) / "lists.json").write_text(json.dumps(lists), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
