"""A grammar is one more axis: in any batch, with any drafts and codec, a row says what it says alone."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mantou.chat.grammar.grammars import Grammars, Setting
from mantou.chat.tokenizer import Tokenizer
from mantou.data import Grammar, Request, Sampling
from tests.compose.axes import MIXED
from tests.compose.drafts import make_provider
from tests.compose.harness import VOCAB, Case, Outcome, requests, run
from tests.unit.schema_cases import cases

# Closed shapes only: a model of no sense ends them within the tokens that it has.
NAMES = (
    "object-member",
    "one-of-item",
    "tuple-item",
    "date-member",
    "enum-mixed-item",
    "integer-between-optional",
)
SCHEMAS = [dict(cases())[name] for name in NAMES]
NUM_TOKENS = 110
ARRIVALS = {"r1": 2, "r2": 3, "r3": 9, "r5": 11}


def _tokenizer() -> Tokenizer:
    """One fewer than the model's ids: letters of ASCII that JSON needs, and an end."""
    letters = [chr(code) for code in range(32, 127) if chr(code) not in "~`^"]
    vocabulary = {("\u0120" if letter == " " else letter): number for number, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    made = Tokenizer(backend, {"eos_token": "<|end|>"})
    assert made.vocab_size < VOCAB, "the model has ids that no text has"
    return made


TOKENIZER = _tokenizer()
GRAMMARS = Grammars(TOKENIZER)


def wanted(*, free: tuple[int, ...] = (0, 3)) -> list[Request]:
    """Six rows; those in `free` have no grammar."""
    found = []
    for i, request in enumerate(requests(MIXED, NUM_TOKENS, eos=TOKENIZER.eos)):
        wish = Grammar("json_schema", json.dumps(SCHEMAS[i]))
        grammar = "" if i in free else GRAMMARS.write(wish, Setting())
        found.append(replace(request, grammar=grammar, max_tokens=20 if i in free else NUM_TOKENS))
    return found


@cache
def alone(codec: str) -> Outcome:
    return run(Case(codec=codec, constraints=GRAMMARS), wanted())


def check(outcome: Outcome) -> int:
    """How many answers came to their end; each of them is valid."""
    num_finished = 0
    for i, request in enumerate(wanted()):
        if request.grammar and outcome.finish(request.id) == "stop":
            jsonschema.validate(json.loads(TOKENIZER.decode(outcome.tokens[request.id])), SCHEMAS[i])
            num_finished += 1
    assert not [event.error for event in outcome.events if event.error]
    return num_finished


@pytest.mark.parametrize(
    ("codec", "provider", "fill"),
    [
        *(("off", provider, False) for provider in ("none", "oracle", "ngram", "model")),
        *(("8", provider, fill) for provider in ("ngram", "model") for fill in (False, True)),
        ("turbo", "oracle", True),
    ],
)
def test_a_constrained_row_says_the_same_in_every_company(codec: str, provider: str, fill: bool) -> None:
    expected = alone(codec)
    assert check(expected) >= 3
    case = Case(
        rows=6,
        codec=codec,
        chunk=16,
        provider=make_provider(provider, "llama", expected.tokens),
        constraints=GRAMMARS,
        fill=fill,
        pipelined=not fill,
    )
    assert run(case, wanted(), ARRIVALS).tokens == expected.tokens


def test_neighbours_of_a_constrained_row_do_not_change() -> None:
    free = run(Case(rows=6, constraints=GRAMMARS), wanted(free=tuple(range(6))))
    mixed = run(Case(rows=6, constraints=GRAMMARS), wanted())
    for name in ("r0", "r3"):
        assert free.tokens[name] == mixed.tokens[name]


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    bias: Any = tuple((token, 50.0) for token in range(TOKENIZER.vocab_size, VOCAB))
    sampling = Sampling(temperature=1.0, logit_bias=bias)
    request = replace(wanted()[1], sampling=sampling)
    tokens = run(Case(constraints=GRAMMARS), [request]).tokens["r1"]
    assert max(tokens) < TOKENIZER.vocab_size
