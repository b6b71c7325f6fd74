"""`python -m tests.bench.quality`: what each KV scheme costs in quality, written to docs/performance/kv-quality.md.

Every model reads the same text, teacher-forced, in chunks over the engine's own rows. Against native KV: perplexity,
KL(native || scheme) of the next-token distributions, and how often the likeliest token is the same. Beside the
starter model run two models that are trained here, on the first part of the text and by bytes: one with full attention,
one with sliding windows. Exits with 1 if a scheme misses its bounds. Knows no server.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mantou.chat.tokenizer import Tokenizer
from mantou.config import STARTER
from mantou.kv.codecs import make_scheme
from mantou.models.device import this_device
from mantou.models.families import Family
from mantou.models.hub import obtain
from mantou.models.load import LoadedModel, describe, family_module, load
from mantou.models.ops import device_ops
from mantou.models.runner import Runner
from mantou.progress import ProgressBoard
from mantou.protocols import Group, KVScheme

TEXT = Path(__file__).with_name("texts") / "declaration.txt"
RESULT = Path(__file__).resolve().parents[2] / "docs" / "performance" / "kv-quality.md"
CHUNK = 128

SCHEMES: Mapping[str, dict[str, Any]] = {
    "off": {},
    "8": {},
    "8, groups of 32": {"group_size": 32},
    "4": {},
    "4, groups of 32": {"group_size": 32},
    "turbo": {},
    "turbo-k4v2": {},
    "4 from 512 on": {"start": 512},
}
# Greatest mean KL in nats a token, and greatest perplexity as a multiple of native.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "8": (0.005, 1.01),
    "8, groups of 32": (0.005, 1.01),
    "turbo": (0.15, 1.10),
}
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_TRAINED: Mapping[str, dict[str, Any]] = {
    "qwen3": {**_SMALL, "model_type": "qwen3"},
    "gemma3_text": {
        **_SMALL,
        "model_type": "gemma3_text",
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000.0,
    },
}


@dataclass(frozen=True)
class Subject:
    """A model and the tokens that it reads."""

    name: str
    model: LoadedModel
    tokens: Sequence[int]


@dataclass(frozen=True)
class Score:
    scheme: str
    token_bytes: float
    perplexity: float
    kl: float
    worst_kl: float
    same_top: float


# ------------------------------------------------------------------ models
def real(name: str, num_tokens: int) -> Subject:
    """A model folder, or what `mantou serve` takes."""
    folder = Path(name)
    if not folder.is_dir():
        folder = obtain(name, revision=None, cache_dir=None, board=ProgressBoard())
    model = load(folder)
    device_ops(this_device().kind).install(model.module)
    tokens = Tokenizer.load(folder).encode(TEXT.read_text("utf-8"), add_special_tokens=True)
    return Subject(folder.name, model, tokens[:num_tokens])


def trained(family: str, num_tokens: int, steps: int) -> Subject:
    """A byte model trained on the first three quarters of the text; it reads on from there."""
    source = family_module(family)
    config = _TRAINED[family]
    mx.random.seed(0)
    module = source.Model(source.ModelArgs.from_dict(dict(config)))
    data = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int32)
    split = len(data) * 3 // 4
    dice, optimizer = np.random.default_rng(0), optim.AdamW(learning_rate=2e-3)

    def loss(model: Any, batch: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")

    gradient = nn.value_and_grad(module, loss)
    for _ in range(steps):
        begins = dice.integers(0, split - 129, 4)
        batch = mx.array(np.stack([data[at : at + 129] for at in begins]))
        _, gradients = gradient(module, batch)
        optimizer.update(module, gradients)
        mx.eval(module.parameters(), optimizer.state)
    module.eval()
    model = describe(module, config, Family(family, supported=True))
    begin = max(min(split, len(data) - num_tokens), 0)
    return Subject(
        f"{family}, 3 layers, trained {steps} steps", model, data[begin : begin + num_tokens].tolist()
    )


# ------------------------------------------------------------------ scores
def log_probabilities(subject: Subject, scheme: KVScheme) -> tuple[np.ndarray, Runner]:
    """float32[T - 1, V]: of each token after those before it."""
    runner = Runner(subject.model, scheme, max_width=CHUNK)
    runner.kv.resize(1)
    found: list[np.ndarray] = []
    for lo in range(0, len(subject.tokens), CHUNK):
        chunk = list(subject.tokens[lo : lo + CHUNK])
        group = Group(0, len(chunk), (len(chunk),))
        _, logits = runner.forward(group, [chunk], None)
        logits = logits[0].astype(mx.float32)
        found.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        runner.kv.commit(group, group.num_tokens)
        runner.wait()
    return np.concatenate(found)[:-1], runner


def score(subject: Subject, name: str, native: np.ndarray | None) -> tuple[Score, np.ndarray]:
    scheme = make_scheme(name.replace(",", " ").split(maxsplit=1)[0], **SCHEMES[name])
    found, runner = log_probabilities(subject, scheme)
    native = found if native is None else native
    following = np.array(subject.tokens[1:])
    divergence = (np.exp(native) * (native - found)).sum(-1)
    return (
        Score(
            name,
            runner.plan.token_bytes(),
            math.exp(-found[np.arange(len(following)), following].mean()),
            float(divergence.mean()),
            float(divergence.max()),
            float((native.argmax(-1) == found.argmax(-1)).mean()),
        ),
        native,
    )


def measure(subject: Subject) -> list[Score]:
    scores: list[Score] = []
    native: np.ndarray | None = None
    for name in SCHEMES:
        made, native = score(subject, name, native)
        scores.append(made)
        print(f"{subject.name}: {made}", flush=True)
        mx.clear_cache()
    return scores


def misses(scores: Sequence[Score]) -> list[str]:
    """What is out of bounds, in words."""
    plain = scores[0].perplexity
    found: list[str] = []
    for s in scores:
        kl, ratio = BOUNDS.get(s.scheme, (math.inf, math.inf))
        if s.kl > kl or s.perplexity > ratio * plain:
            found.append(
                f"{s.scheme}: KL {s.kl:.4f} (bound {kl}), perplexity {s.perplexity / plain:.3f}x ({ratio})"
            )
    return found


# ------------------------------------------------------------------ the page
def page(results: Mapping[str, Sequence[Score]], num_tokens: Mapping[str, int]) -> str:
    lines = [
        "# KV schemes: what they cost in quality",
        "",
        "Written by `python -m tests.bench.quality`; do not edit. Each model reads the same public-domain text",
        "(`tests/bench/texts`), teacher-forced in chunks of 128 tokens over the engine's rows. KL is that of the",
        "next-token distribution from the one with native KV, in nats a token. SmolLM2's weights were 4 bit before,",
        "so its native perplexity is not that of the original. The trained byte models are small and read what they do",
        "not know.",
        "",
        f"{datetime.datetime.now(datetime.UTC).date()}, {this_device().name}, {platform.system()}.",
    ]
    for name, scores in results.items():
        plain = scores[0]
        lines += [
            "",
            f"## {name}, {num_tokens[name]} tokens",
            "",
            "| --kv-quant | bytes a token | of native | perplexity | mean KL | worst KL | same top token |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {s.scheme} | {s.token_bytes:.0f} | {s.token_bytes / plain.token_bytes:.2f} | {s.perplexity:.3f} | "
            f"{s.kl:.5f} | {s.worst_kl:.3f} | {s.same_top:.3f} |"
            for s in scores
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__)
    parser.add_argument(
        "--model", default=STARTER, help="the real model: a folder, or what `mantou serve` takes"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens that each model reads")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the byte models")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    subjects = [trained(family, args.tokens, args.steps) for family in _TRAINED]
    subjects.insert(0, real(args.model, args.tokens))
    results = {subject.name: measure(subject) for subject in subjects}
    args.out.write_text(page(results, {s.name: len(s.tokens) for s in subjects}), "utf-8")
    wrong = [f"{name}: {line}" for name, scores in results.items() for line in misses(scores)]
    print("\n".join(wrong) or "every scheme is within its bounds")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
