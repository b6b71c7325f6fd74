"""A budget of reasoning: where it is used up the block is closed, in every format, and what follows is the answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import mantou
from mantou.chat.grammar.grammars import Grammars, Setting
from mantou.chat.reasoning import FORMATS, ReasoningFormat
from mantou.chat.stream import TextStream
from mantou.chat.tokenizer import Tokenizer
from mantou.chat.tools import ToolUse, named
from mantou.data import Grammar, ReasoningBudget, Request, Sampling, TokenEvent
from mantou.library import Completion, Model
from mantou.protocols import Constraint
from tests.fakes import allows, unpacked
from tests.fakes_api import byte_tokenizer
from tests.real import starter_folder

BYTES = byte_tokenizer()
TAGS = FORMATS[0]


def with_specials(*pieces: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: rank for rank, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", *pieces])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


def limited(tokenizer: Tokenizer, budget: ReasoningBudget, grammar: str = "") -> Constraint:
    request = Request("r", (1,), Sampling(), grammar=grammar, reasoning_budget=budget)
    found = Grammars(tokenizer).make(request) if not grammar else GRAMMARS.make(request)
    assert found is not None
    return found


GRAMMARS = Grammars(BYTES)


def write(tokenizer: Tokenizer, found: Constraint, wished: str) -> tuple[str, int]:
    """What comes out if the model wishes to say a text, and how many tokens of it were forced."""
    tokens: list[int] = []
    num_forced = 0
    for token in tokenizer.encode(wished, add_special_tokens=False):
        while forced := found.forced():
            mask = found.mask()
            assert mask is not None
            assert np.flatnonzero(unpacked(mask)).tolist() == [forced[0]]
            num_forced += 1
            tokens.append(forced[0])
            found.advance(forced[0])
        mask = found.mask()
        assert mask is None or allows(mask, token), f"forbidden after {text_of(tokenizer, tokens)!r}"
        tokens.append(token)
        found.advance(token)
    return text_of(tokenizer, tokens), num_forced


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()


@pytest.mark.parametrize(
    ("opened", "wished", "said"),
    [
        (True, "12345678So", "12345\n</think>\n\n678So"),
        (True, "1234\nabc", "1234\n</think>\n\nabc"),
        (True, "123</think>So", "123</think>\n\nthink>So"),  # begun in time, and finished
        (False, "<think>1234567", "<think>12345\n</think>\n\n67"),
        (False, "\n <think>1234567", "\n <think>12345\n</think>\n\n67"),
        (False, "So. <think>1234567", "So. <think>1234567"),  # text that only speaks of the tag
    ],
)
def test_the_block_ends_at_its_budget_and_not_before(opened: bool, wished: str, said: str) -> None:
    assert write(BYTES, limited(BYTES, TAGS.budget(5, opened=opened)), wished)[0] == said


def test_a_block_that_the_model_closes_in_time_is_left_alone() -> None:
    assert write(BYTES, limited(BYTES, TAGS.budget(11, opened=True)), "12</think>So it is") == (
        "12</think>So it is",
        0,
    )


def test_a_character_is_finished_before_the_block_is_ended() -> None:
    assert write(BYTES, limited(BYTES, TAGS.budget(2, opened=True)), "a😀b")[0] == "a😀\n</think>\n\nb"
    grammar = GRAMMARS.write(Grammar("json_object"), Setting(reasoning=TAGS, reasoning_open=True))
    found = limited(BYTES, TAGS.budget(2, opened=True), grammar)
    assert write(BYTES, found, 'a😀"a')[0] == 'a😀\n</think>\n\n{"a'


def test_nothing_left_to_spend_closes_a_block_at_once() -> None:
    assert write(BYTES, limited(BYTES, TAGS.budget(0, opened=True)), "So")[0] == "\n</think>\n\nSo"


def test_a_special_tag_is_known_by_its_id_and_cannot_open_a_second_block() -> None:
    made = with_specials("[THINK]", "[/THINK]")
    opening, closing = (made.token_id(tag) for tag in ("[THINK]", "[/THINK]"))
    assert opening is not None
    form = ReasoningFormat("bracket-think", "[THINK]", "[/THINK]", ids=(opening, closing or 0))
    found = limited(made, form.budget(3, opened=False))
    said, num_forced = write(made, found, "Hm [THINK]abcdef")
    assert (said, num_forced) == ("Hm [THINK]abc[/THINK]def", 1)
    mask = found.mask()
    assert mask is not None
    assert np.flatnonzero(~unpacked(mask, made.num_ids)).tolist() == [opening]


def test_channels_are_ended_with_the_header_of_the_next_message() -> None:
    made = with_specials("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    form = named("harmony", made)
    assert form.reasoning is not None
    found = limited(made, form.reasoning.budget(4, opened=False))
    said, _ = write(made, found, "<|channel|>analysis<|message|>abcdef")
    assert said.startswith("<|channel|>analysis<|message|>abcd<|end|><|start|>assistantef")
    found = limited(made, form.reasoning.budget(4, opened=False))
    wished = "<|channel|>analysis<|message|>abcd<|channel|>final<|message|>So."
    said, _ = write(made, found, wished)
    stream = TextStream(made, reasoning=form.reasoning, tools=ToolUse.of(form, ()))
    event = stream.feed(TokenEvent("r", tuple(made.encode(said, add_special_tokens=False)), finish="stop"))
    assert (event.reasoning, event.text) == ("abcd", "So.")


def test_a_grammar_goes_on_behind_the_block_that_was_cut() -> None:
    grammar = GRAMMARS.write(Grammar("json_object"), Setting(reasoning=TAGS, reasoning_open=True))
    found = limited(BYTES, TAGS.budget(4, opened=True), grammar)
    assert write(BYTES, found, 'abcd"a')[0] == 'abcd\n</think>\n\n{"a'


def test_rewinding_restores_masks_and_forced_tokens() -> None:
    dice = random.Random(4)
    tokens = BYTES.encode("ab\n</think>\n\nSo it is", add_special_tokens=False)
    straight, wild = (limited(BYTES, TAGS.budget(2, opened=True)) for _ in range(2))
    expected: list[Any] = []
    for token in [*tokens, None]:
        mask = straight.mask()
        expected.append((None if mask is None else mask.tolist(), list(straight.forced())))
        if token is not None:
            straight.advance(token)
    place = 0
    for _ in range(80):
        target = dice.randint(0, len(tokens))
        if target < place:
            wild.rewind(place - target)
        for token in tokens[place:target]:
            wild.advance(token)
        place = target
        mask = wild.mask()
        assert (None if mask is None else mask.tolist(), list(wild.forced())) == expected[place]


# ------------------------------------------------------------------ a real model
BUDGET = 16
ASK = "Why is the sky blue? Think about it."
QUESTIONS = (ASK, "Count to ten, then count to ten again.", "Name a fruit.", "Is 7 a prime number?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter model with a template that opens a block, as those of reasoning models do."""
    made = tmp_path_factory.mktemp("thinker") / "starter"
    shutil.copytree(starter_folder(), made, symlinks=True, copy_function=lambda a, b: Path(b).symlink_to(a))
    template = made / "chat_template.jinja"
    text = template.read_text("utf-8")
    template.unlink()
    template.write_text(f"{text}{{% if add_generation_prompt %}}<think>\n{{% endif %}}", "utf-8")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with mantou.load(str(folder), batch=4, draft_kind="off") as loaded:
        yield loaded


def no_end(model: Model) -> tuple[tuple[int, float], ...]:
    """The starter model does not know the tags, so it would end its answer where it should end its reasoning."""
    return tuple((token, -100.0) for token in sorted(model.tokenizer.eos))


def seen(answer: Completion) -> tuple[str, str, int, int]:
    return answer.reasoning, answer.text, answer.usage.completion_tokens, answer.usage.reasoning_tokens


@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_model_stops_thinking_at_its_budget_and_answers(model: Model, wish: dict[str, Any]) -> None:
    wish = wish | {"seed": 3, "logit_bias": no_end(model)}
    free = model.generate(ASK, max_tokens=64, **wish)
    assert free.usage.reasoning_tokens == 64, "it would have gone on"
    answer = model.generate(ASK, max_tokens=64, thinking_budget=BUDGET, **wish)
    tag = len(model.tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
    assert BUDGET < answer.usage.reasoning_tokens <= BUDGET + tag
    assert free.reasoning.startswith(answer.reasoning.rstrip("\ufffd"))
    assert answer.text
    assert answer.usage.completion_tokens > BUDGET + tag


def test_four_in_a_batch_say_what_each_says_alone_with_drafts_and_eight_bits_too(
    model: Model, folder: Path
) -> None:
    wish: dict[str, Any] = {"temperature": 0.8, "max_tokens": 40, "thinking_budget": BUDGET}
    wish["logit_bias"] = no_end(model)
    together = model.batch(QUESTIONS, seed=5, **wish)
    alone = [model.generate(question, seed=5 + i, **wish) for i, question in enumerate(QUESTIONS)]
    assert [seen(answer) for answer in together] == [seen(answer) for answer in alone]
    said = []
    for kind in ("off", "ngram"):
        options: dict[str, Any] = {"batch": 4, "kv_quant": "8", "draft_kind": kind}
        with mantou.load(str(folder), **options, **({"fill": "strict"} if kind == "ngram" else {})) as other:
            said.append([seen(answer) for answer in other.batch(QUESTIONS, seed=5, **wish)])
    assert said[0] == said[1]
    assert all(BUDGET < row[3] < BUDGET + 12 for row in said[0])


def test_a_schema_is_followed_behind_the_block_that_was_cut(model: Model) -> None:
    schema = {"type": "object", "properties": {"color": {"enum": ["blue", "red"]}}, "required": ["color"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = model.generate(ASK, max_tokens=64, response_format=form, thinking_budget=BUDGET)
    assert json.loads(answer.text)["color"] in ("blue", "red")
    assert answer.reasoning
    assert answer.finish == "stop"
