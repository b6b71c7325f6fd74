"""Texts -> token rows of an embedding model: prompts in front, special tokens around, the length checked. No arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mantou.data import TokenRow
from mantou.errors import BadRequest, ContextOverflow

if TYPE_CHECKING:
    from mantou.chat.tokenizer import Tokenizer
    from mantou.models.embedder_recipe import Recipe


@dataclass(frozen=True, slots=True)
class Preface:
    """What stands in front of each text: a task in words, or the name of one of the checkpoint's prompts."""

    instruction: str | None = None
    prompt_name: str | None = None


class EmbeddingText:
    """The text side of one embedding model. Immutable, safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        bare = tokenizer.encode("a", add_special_tokens=False)
        adds_end = self._encode("a", "input")[-1:] != bare[-1:]
        # Copies of decoder checkpoints lose the rule that ends a text, and pooling reads that last token.
        self._end = (
            () if recipe.graph != "decoder" or adds_end or recipe.end_token is None else (recipe.end_token,)
        )

    def rows(
        self, inputs: Sequence[str | Sequence[int]], preface: Preface, *, truncate: bool, param: str = "input"
    ) -> list[TokenRow]:
        """One row an input; token arrays are taken as they are. Raises BadRequest that names the input."""
        form = self._form(preface)
        rows: list[TokenRow] = []
        for index, item in enumerate(inputs):
            name = f"{param}[{index}]" if len(inputs) > 1 else param
            if isinstance(item, str):
                rows.append(self._row(self._texts(form, item, name), name, truncate))
            else:
                if preface.instruction is not None or preface.prompt_name is not None:
                    raise BadRequest(
                        f"{name} is a list of tokens, which takes no instruction or prompt; send text.",
                        param=param,
                    )
                rows.append(self._row(self._checked(item, name), name, truncate, ends=0))
        return rows

    def pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool, param: str = "documents"
    ) -> list[TokenRow]:
        """One row a pair of texts, for a cross-encoder. `truncate` cuts the second text."""
        return [
            self._pair(one, other, f"{param}[{i}]", truncate=truncate) for i, (one, other) in enumerate(pairs)
        ]

    # ------------------------------------------------------------------ texts
    def _form(self, preface: Preface) -> str:
        """The text with {text} in it that every input is put into."""
        recipe = self._recipe
        if preface.instruction is not None:
            if preface.prompt_name is not None:
                raise BadRequest(
                    "instruction and prompt_name exclude each other; send one.", param="prompt_name"
                )
            if recipe.instruction is None:
                raise BadRequest(
                    "This model was not trained on instructions; leave instruction out.", param="instruction"
                )
            return recipe.instruction.replace("{instruction}", preface.instruction)
        name = preface.prompt_name or recipe.default_prompt
        if name is None:
            return "{text}"
        if name not in recipe.prompts:
            known = ", ".join(recipe.prompts) or "none"
            raise BadRequest(f"This model has no prompt of that name; it has: {known}.", param="prompt_name")
        return recipe.prompts[name] + "{text}"

    def _texts(self, form: str, text: str, name: str) -> list[int]:
        # Not str.format: an instruction may hold braces.
        head, _, tail = form.rpartition("{text}")
        return [*self._encode(f"{head}{text}{tail}", name), *self._end]

    def _encode(self, text: str, name: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=True)
        except UnicodeEncodeError:
            raise _surrogate(name) from None

    def _checked(self, tokens: Sequence[int], name: str) -> list[int]:
        size = self._tokenizer.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise BadRequest(
                f"{name} holds a token id outside this model's vocabulary of {size}.", param="input"
            )
        return list(tokens)

    def _row(self, tokens: list[int], name: str, truncate: bool, ends: int = 1) -> TokenRow:
        """Special tokens at the end stay when a row is cut."""
        limit = self._recipe.max_tokens
        if not tokens:
            raise BadRequest(f"{name} is empty; send at least one token.", param="input")
        if len(tokens) > limit:
            if not truncate:
                raise _too_long(name, len(tokens), limit)
            last = tokens[-1:] if ends and tokens[-1] in self._tokenizer.special_ids else []
            tokens = [*tokens[: limit - len(last)], *last]
        return TokenRow(tuple(tokens))

    def _pair(self, one: str, other: str, name: str, *, truncate: bool) -> TokenRow:
        try:
            tokens, second = self._tokenizer.encode_pair(one, other)
        except UnicodeEncodeError:
            raise _surrogate(name) from None
        limit = self._recipe.max_tokens
        if len(tokens) > limit:
            own = len(self._tokenizer.encode(other, add_special_tokens=False))
            if not truncate or len(tokens) - own >= limit:
                raise _too_long(f"{name} with the query", len(tokens), limit)
            tokens = [*tokens[: limit - 1], tokens[-1]]
        return TokenRow(tuple(tokens), second)


def _surrogate(name: str) -> BadRequest:
    return BadRequest(
        f"{name} holds half of a surrogate pair, which is no text; remove it.", param=_field(name)
    )


def _field(name: str) -> str:
    """documents of documents[3] with the query."""
    return name.partition("[")[0]


def _too_long(name: str, length: int, limit: int) -> ContextOverflow:
    return ContextOverflow(
        f"{name} has {length} tokens and the model reads {limit} at most; shorten it, or send truncate: true.",
        param=_field(name),
    )
