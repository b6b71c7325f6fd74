"""POST /v1/completions: raw text in, raw text out. Parse, plan, encode. Knows no engine and no connection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mantou.api import shapes
from mantou.api.fields import Boolean, Field, Integer, Schema, Shaped, kind_of, properties, whole, wrong
from mantou.api.generation import Answer
from mantou.api.generation_fields import MAX_CHOICES, TABLE, GenerationAsk, read_generation
from mantou.api.openai.logprobs import text_logprobs
from mantou.api.openai.wire import Completion, TextChoice, encode, usage_body
from mantou.api.planning import Head, Job, RowOptions, length_check, plan_rows
from mantou.api.sse import DONE
from mantou.api.structured import FORMAT
from mantou.data import Grammar, Prompt, TextEvent, Usage
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.config import Config

MAX_TOP_LOGPROBS = 20

RawPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """A checked body. `num_top` is None where no log-probabilities are asked for. `generation.n` answers are made for
    each prompt, and the `num_kept` of them whose tokens are the most likely on average are sent.
    """

    generation: GenerationAsk
    prompts: tuple[RawPrompt, ...]
    echo: bool
    num_top: int | None
    grammar: Grammar | None = None  # response_format
    num_kept: int | None = None  # None = all

    @property
    def num_characters(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def compiles(self) -> bool:
        return bool(self.grammar or self.generation.grammar)


def _one_prompt(value: Any, where: str, name: str) -> RawPrompt:
    if isinstance(value, str):
        if not value:
            raise BadRequest(f"{where} is empty; send some text.", param=name)
        return value
    if not isinstance(value, list):
        raise BadRequest(
            f"{where} must be a string or a list of token ids, got {kind_of(value)}.", param=name
        )
    tokens = [token for entry in value if (token := whole(entry)) is not None]
    if not value or len(tokens) < len(value):
        raise BadRequest(f"{where} must be a list of token ids with at least one of them.", param=name)
    return tuple(tokens)


def _prompts(value: Any, name: str) -> tuple[RawPrompt, ...]:
    if isinstance(value, list) and value and whole(value[0]) is None:
        return tuple(_one_prompt(entry, f"{name}[{index}]", name) for index, entry in enumerate(value))
    return (_one_prompt(value, name, name),)


def _logprobs(value: Any, name: str) -> int | None:
    """OpenAI's number of alternatives; mlx-lm clients send true or false here."""
    if isinstance(value, bool):
        return 0 if value else None
    number = whole(value)
    if number is None:
        raise wrong(name, "a whole number", value)
    if not 0 <= number <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}.", param=name)
    return number


def _nothing(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    if value:
        raise BadRequest(
            f"{name} is not supported: this server completes from the left only; leave it out.", param=name
        )


_PROMPT = Shaped(
    "prompt",
    "A text, a list of token ids, or a list of either (an answer for each).",
    _prompts,
    shapes.PROMPT,
)
_ECHO = Boolean("echo", "Send the prompt in front of the answer.")
_SUFFIX = Shaped("suffix", "Not supported.", _nothing, {"type": ["string", "null"], "maxLength": 0})
_LOGPROBS = Shaped(
    "logprobs",
    "Send log-probabilities with this many alternatives for every token.",
    _logprobs,
    {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
)
_TOP_LOGPROBS = Integer(
    "top_logprobs", "How many alternatives, where logprobs is true; -1 = none.", -1, MAX_TOP_LOGPROBS
)
_BEST_OF = Integer(
    "best_of",
    "How many answers to make, of which the n with the most likely tokens on average are sent; not for streams.",
    1,
    MAX_CHOICES,
)
_OWN: tuple[Field[Any], ...] = (_PROMPT, _ECHO, _SUFFIX, _LOGPROBS, _TOP_LOGPROBS, _BEST_OF, FORMAT)


class OpenAICompletions:
    """The raw-text dialect."""

    path = "/v1/completions"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> CompletionAsk:
        """Checks every field. Raises BadRequest that names the first wrong one."""
        prompts = _PROMPT.read(body)
        if prompts is None:
            raise BadRequest("prompt is missing; send a text.", param="prompt")
        _SUFFIX.read(body)
        generation = read_generation(body, headers)
        best_of = _best_of(body, generation)
        num_top = _LOGPROBS.read(body)
        more = max(_TOP_LOGPROBS.read(body) or 0, 0)
        if more:
            num_top = max(num_top or 0, more)
        echo = _ECHO.read(body) or False
        if echo and num_top is not None:
            raise BadRequest(
                "logprobs of an echoed prompt are not supported: this server computes chances where a token is drawn, "
                "not for every token of a prompt; leave echo or logprobs out.",
                param="echo",
            )
        kept = generation.n if best_of > generation.n else None
        return CompletionAsk(replace(generation, n=best_of), prompts, echo, num_top, FORMAT.read(body), kept)

    def plan(self, ask: CompletionAsk, loaded: Loaded, config: Config, fingerprint: str, created: int) -> Job:
        """Tokenises the prompts. Raises BadRequest where the model cannot do what is asked."""
        check = length_check(loaded, config)
        prompts = [_tokenise(prompt, loaded, check) for prompt in ask.prompts]
        head = Head(f"cmpl-{uuid4()}", created, loaded.info.id, fingerprint)
        options = RowOptions(
            logprobs=ask.num_top is not None or ask.num_kept is not None,
            top_logprobs=ask.num_top or 0,
            grammar=ask.grammar,
        )
        rows = plan_rows(ask.generation, prompts, options, loaded=loaded, config=config, response_id=head.id)
        echoes = [prompts[row.prompt].text if ask.echo else "" for row in rows]
        return Job(rows, CompletionEncoder(head, ask, echoes, [row.prompt for row in rows], loaded))

    def schema(self) -> Schema:
        """The body as a JSON schema."""
        return {"type": "object", "required": ["prompt"], "properties": properties((*_OWN, *TABLE))}


def _tokenise(prompt: RawPrompt, loaded: Loaded, check: Callable[[str], None]) -> Prompt:
    if isinstance(prompt, str):
        check(prompt)
        tokens = tuple(loaded.tokenizer.encode(prompt, add_special_tokens=True))
        return Prompt(tokens, prompt)
    for token in prompt:
        if not 0 <= token < loaded.info.vocab_size:
            raise BadRequest(
                f"prompt holds a token id outside the vocabulary of {loaded.info.vocab_size}.", param="prompt"
            )
    return Prompt(prompt, loaded.tokenizer.decode(prompt))


def _best_of(body: Mapping[str, Any], generation: GenerationAsk) -> int:
    """How many answers to make for each prompt. Raises BadRequest."""
    best_of = _BEST_OF.read(body) or generation.n
    if best_of < generation.n:
        raise BadRequest(
            f"best_of must be at least n, which is {generation.n}, got {best_of}.", param="best_of"
        )
    if best_of > generation.n and generation.stream:
        raise BadRequest(
            "best_of cannot be streamed: which answer is the best shows at the end; leave stream or best_of out.",
            param="best_of",
        )
    return best_of


def _likelihood(answer: Answer) -> float:
    """The mean log-probability of the tokens; an empty answer is the least likely."""
    found = [entry.logprob for entry in answer.logprobs]
    return sum(found) / len(found) if found else -math.inf


class CompletionEncoder:
    """Writes chunks from constant parts made once. Offsets of tokens count characters of the answer's text."""

    def __init__(
        self,
        head: Head,
        ask: CompletionAsk,
        echoes: Sequence[str],
        prompts: Sequence[int],
        loaded: Loaded,
    ) -> None:
        """`echoes` and `prompts`: for each row, what is sent in front of it, and which prompt it answers."""
        self._head = head
        self._prompts = prompts
        self._ask = ask
        self._echoes = echoes
        self._tokenizer = loaded.tokenizer
        self._usage_apart = ask.generation.include_usage
        self._offsets = [0] * len(echoes)
        chunk = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._before = b"data: " + encode(chunk)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._usage_apart else b"]}\n\n"

    def start(self, index: int) -> bytes:
        return self._chunk(index, self._echoes[index]) if self._ask.echo else b""

    def text(self, index: int, event: TextEvent) -> bytes:
        if not event.text and not event.logprobs:
            return b""
        if self._ask.num_top is None:
            return self._chunk(index, event.text)
        found, self._offsets[index] = text_logprobs(
            self._tokenizer, event.logprobs, self._ask.num_top, self._offsets[index]
        )
        return self._chunk(index, event.text, encode(found))

    def finish(self, index: int, reason: str, usage: Usage | None) -> bytes:
        """Without stream_options, usage rides on the last chunk, so that no client has to ask for it."""
        chunk = self._chunk(index, "", reason=encode(reason))
        if usage is None or self._usage_apart is not None:
            return chunk
        return chunk[: -len(b"}\n\n")] + b',"usage":' + encode(usage_body(usage)) + b"}\n\n"

    def done(self, usage: Usage) -> bytes:
        if not self._usage_apart:
            return DONE
        return self._before + b'],"usage":' + encode(usage_body(usage)) + b"}\n\n" + DONE

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return encode(
            Completion(
                id=self._head.id,
                object="text_completion",
                created=self._head.created,
                model=self._head.model,
                system_fingerprint=self._head.fingerprint,
                choices=[
                    self._choice(index, row, answers[row]) for index, row in enumerate(self._kept(answers))
                ],
                usage=usage_body(usage),
            )
        )

    def _kept(self, answers: Sequence[Answer]) -> list[int]:
        """The rows that are sent: for each prompt, the most likely first."""
        if self._ask.num_kept is None:
            return list(range(len(answers)))
        found: dict[int, list[int]] = {}
        for row, prompt in enumerate(self._prompts):
            found.setdefault(prompt, []).append(row)
        best = [sorted(rows, key=lambda row: -_likelihood(answers[row])) for rows in found.values()]
        return [row for rows in best for row in rows[: self._ask.num_kept]]

    def _choice(self, index: int, row: int, answer: Answer) -> TextChoice:
        logprobs = None
        if self._ask.num_top is not None:
            logprobs, _ = text_logprobs(self._tokenizer, answer.logprobs, self._ask.num_top, 0)
        text = self._echoes[row] + "".join(answer.text)
        return TextChoice(text, index, logprobs, "length" if answer.finish == "length" else "stop")

    def _chunk(self, index: int, text: str, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"text":%b,"index":%d,"logprobs":%b,"finish_reason":%b}' % (
            encode(text),
            index,
            logprobs,
            reason,
        )
        return self._before + choice + self._after
