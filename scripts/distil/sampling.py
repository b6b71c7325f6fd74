"""Chats that a model holds with itself, hundreds at once, with the hidden state behind every token.

Rows are token streams of one length. A stream begins with a system message; its user messages are either given or the
model's own (what follows an empty user turn is a user's question), and its answers are the model's. Which token comes
next is decided on the device, so that the host never waits between two steps. Knows no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

_MIN_P = 0.03  # tokens of a smaller share of the likeliest one's chance are never drawn
_USER_MOST = 200  # tokens of a question before it is cut


@dataclass(frozen=True)
class Template:
    """ChatML in token ids."""

    open_user: tuple[int, ...]  # after the end of a message
    open_answer: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, encode: Any) -> Template:
        end, newline = encode("<|im_end|>"), encode("\n")
        assert len(end) == len(newline) == 1, "this script knows models with a ChatML template"
        user, answer = encode("\n<|im_start|>user\n"), encode("\n<|im_start|>assistant\n")
        return cls(tuple(user), tuple(answer), end[0])

    @property
    def most(self) -> int:
        """A number of opening tokens that says that none are left."""
        return max(len(self.open_user), len(self.open_answer))


@dataclass(frozen=True)
class Samples:
    """tokens[r, i], the hidden state of the forward that read it, and whether it belongs to an answer."""

    tokens: mx.array  # int32[R, L]
    hidden: mx.array  # [R, L, D]; hidden[r, i] draws tokens[r, i + 1]
    answers: mx.array  # bool[R, L]


def dense(module: Any, dtype: mx.Dtype) -> Any:
    """The graph with plain weights of `dtype`."""
    for _, parent in module.named_modules():
        for name, child in parent.children().items():
            if not isinstance(child, nn.QuantizedLinear | nn.QuantizedEmbedding):
                continue
            weight = mx.dequantize(
                child.weight, child.scales, child.biases, group_size=child.group_size, bits=child.bits
            )
            if isinstance(child, nn.QuantizedLinear):
                plain = nn.Linear(1, 1, bias="bias" in child)
                if "bias" in child:
                    plain.bias = child.bias
            else:
                plain = nn.Embedding(1, 1)
            plain.weight = weight
            parent[name] = plain
    module.set_dtype(dtype)
    mx.eval(module.parameters())
    return module


def project(module: Any, hidden: mx.array) -> mx.array:
    """Logits of hidden states."""
    tied = getattr(module.args, "tie_word_embeddings", False)
    return module.model.embed_tokens.as_linear(hidden) if tied else module.lm_head(hidden)


def _next(template: Template) -> Any:
    """The state machine of all rows: (logits, given, state) -> (token, whether it is of an answer, state).

    Plain operations only: a GPU has kernels for them, and would compile one for each fused graph or kind of gather.
    """
    end = template.end

    def forced(answering: mx.array, opening: mx.array) -> tuple[mx.array, mx.array]:
        """(token that opens the next message, tokens of its opening), by who spoke before."""
        token = mx.zeros_like(opening)
        for place in range(template.most):
            of_user, of_answer = (
                tokens[place] if place < len(tokens) else 0
                for tokens in (template.open_user, template.open_answer)
            )
            token = token + (opening == place) * mx.where(answering, of_user, of_answer)
        return token, mx.where(answering, len(template.open_user), len(template.open_answer))

    def step(
        logits: mx.array,
        given: mx.array,
        answering: mx.array,
        opening: mx.array,
        spoken: mx.array,
        heat: mx.array,
        most: mx.array,
        key: mx.array,
    ) -> tuple[mx.array, ...]:
        logits = logits.astype(mx.float32)
        floor = mx.max(logits, axis=-1, keepdims=True) + float(np.log(_MIN_P))
        warm = mx.where(answering, heat, 1.0)
        noise = mx.random.gumbel(logits.shape, key=key) * warm[:, None]
        drawn = mx.argmax(mx.where(logits >= floor, logits + noise, -mx.inf), axis=-1).astype(mx.int32)
        drawn = mx.where(spoken >= mx.where(answering, most, _USER_MOST), end, drawn)
        next_forced, length = forced(answering, opening)
        is_given, is_opening = given >= 0, (given < 0) & (opening < length)
        token = mx.where(is_given, given, mx.where(is_opening, next_forced, drawn)).astype(mx.int32)
        own = ~is_given & ~is_opening
        ends = (token == end) & (own | is_given)
        opened = is_opening & (opening == length - 1)
        return (
            token,
            own & answering,
            answering != opened,
            mx.where(ends, 0, mx.where(opened, template.most, mx.where(is_opening, opening + 1, opening))),
            mx.where(own & ~ends, spoken + 1, 0),
        )

    return step


def sample(
    module: Any,
    template: Template,
    beginnings: Sequence[Sequence[int]],
    length: int,
    *,
    heats: Sequence[float],
    most: Sequence[int],
    seed: int,
) -> Samples:
    """One chat a row of `length` tokens. A row's beginning ends inside its first user message, or with its end token.

    `heats`: the temperature of each row's answers; `most`: their longest, in tokens.
    """
    from mlx_lm.models.cache import KVCache

    rows = len(beginnings)
    given = np.full((rows, length), -1, np.int32)
    ended = np.zeros(rows, bool)
    for row, tokens in enumerate(beginnings):
        given[row, : min(len(tokens), length)] = tokens[:length]
        ended[row] = tokens[-1] == template.end
    # A beginning holds end tokens of its own (the system message), which open nothing.
    columns = list(mx.array(given).T)
    caches = [KVCache() for _ in module.layers]
    for cache in caches:
        cache.step = -(-length // 256) * 256  # one allocation
    step = _next(template)
    answering = mx.zeros(rows, mx.bool_)
    opening = mx.full(rows, template.most, mx.int32)
    spoken = mx.zeros(rows, mx.int32)
    last = mx.array([len(tokens) - 1 for tokens in beginnings], mx.int32)
    done = mx.array(ended)
    heat, limit = mx.array(heats, mx.float32), mx.array(most, mx.int32)
    keys = mx.random.split(mx.random.key(seed), length)
    tokens, hidden, answers = [columns[0]], [], []
    answers.append(mx.zeros(rows, mx.bool_))
    for i in range(length):
        h = module.model(tokens[-1][:, None], cache=caches)
        hidden.append(h[:, 0])
        if i + 1 == length:
            break
        token, of_answer, answering, opening, spoken = step(
            project(module, h)[:, 0], columns[i + 1], answering, opening, spoken, heat, limit, keys[i]
        )
        # Only the end of the whole beginning opens the answer.
        inside = columns[i + 1] >= 0
        begins = inside & done & (last == i + 1)
        opening = mx.where(inside, mx.where(begins, 0, template.most), opening)
        tokens.append(token)
        answers.append(of_answer)
        mx.async_eval(token, hidden[-1], of_answer, answering, opening, spoken)
        if i % 16 == 15:
            mx.eval(tokens[-8])  # the host may run ahead, but not without end
    samples = Samples(mx.stack(tokens, 1), mx.stack(hidden, 1), mx.stack(answers, 1))
    mx.eval(samples.tokens, samples.hidden, samples.answers)
    return samples
