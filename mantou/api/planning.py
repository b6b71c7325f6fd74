"""From what the caller asked and a loaded model to sequences for the engine. Knows no dialect and no wire."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mantou.api import defaults
from mantou.api.generation import Answer, RowPlan
from mantou.api.generation_fields import GenerationAsk
from mantou.api.structured import one_grammar
from mantou.data import Grammar, Prompt, ReasoningBudget, Request, TextEvent, Usage
from mantou.errors import BadRequest, ContextOverflow

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.chat.grammar.grammars import Grammars
    from mantou.chat.reasoning import ReasoningFormat
    from mantou.chat.tokenizer import Tokenizer
    from mantou.chat.tools import ToolUse
    from mantou.config import Config

# One body may ask for this many sequences in all (prompts x n); more is a batch job, not a request.
MAX_ROWS = 64
# Every vocabulary has a token of more characters than this, so a text of less of them for each token may fit.
_SHORT_TOKEN = 4


class Encoder(Protocol):
    """Writes one response. Stream: `start` of a row before its first event, `finish` after its last, `done` once."""

    def start(self, index: int) -> bytes: ...
    def text(self, index: int, event: TextEvent) -> bytes:
        """Events for new text; empty if there is nothing to say."""
        ...

    def finish(self, index: int, reason: str, usage: Usage | None) -> bytes:
        """The row's last event. `usage` is the whole response's, and given only for the row that ends last."""
        ...

    def done(self, usage: Usage) -> bytes: ...
    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The JSON body of a response that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one response repeats."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run."""

    rows: tuple[RowPlan, ...]
    encoder: Encoder


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What a dialect adds to the shared fields."""

    thinking: bool | None = None
    reasoning: ReasoningFormat | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prediction: str = ""  # text that the answer is expected to repeat
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI's function tools that may be called; () = none
    parallel_tools: bool = True  # False: the answer ends with its first call
    tool_choice: Literal["auto", "required", "named"] = "auto"  # required: at least one call
    tool_name: str | None = None  # the tool that must be called, where one is named
    grammar: Grammar | None = None  # what the answer must be, where the dialect has a field of its own for it
    thinking_budget: int | None = None  # likewise, most tokens of reasoning


def plan_rows(
    ask: GenerationAsk,
    prompts: Sequence[Prompt],
    options: RowOptions,
    *,
    loaded: Loaded,
    config: Config,
    response_id: str,
) -> tuple[RowPlan, ...]:
    """`n` rows for each prompt, in the order of the answers.

    Raises BadRequest for a token outside the vocabulary, an unknown adapter or too many rows, ContextOverflow for a
    prompt that leaves no room for one token.
    """
    if len(prompts) * ask.n > MAX_ROWS:
        raise BadRequest(
            f"{len(prompts)} prompts x n = {ask.n} is more than {MAX_ROWS} answers; send fewer.", param="n"
        )
    _check_bias(ask, loaded.info.vocab_size)
    _check_adapters(ask, loaded.info.extra.get("adapters", ()))
    _check_speculation(ask, loaded.info.extra.get("draft_kinds", ()))
    seed = ask.seed if ask.seed is not None else secrets.randbits(32)
    tools = None
    if options.tools or options.reasoning is not None:  # raw text has neither
        tools = loaded.template.tool_use(options.tools, parallel=options.parallel_tools)
    prediction = tuple(loaded.tokenizer.encode(options.prediction, add_special_tokens=False))
    rows: list[RowPlan] = []
    for number, prompt in enumerate(prompts):
        limit = defaults.max_tokens(ask, config.defaults, _room(prompt, loaded, config))
        grammar = answer_grammar(one_grammar(options.grammar, ask.grammar), options, tools, prompt, loaded)
        for choice in range(ask.n):
            sampling = defaults.sampling(
                ask,
                config.defaults,
                loaded.generation_config,
                seed=seed + choice,
                vocab_size=loaded.info.vocab_size,
                thinking=options.thinking,
                logprobs=options.logprobs,
                top_logprobs=options.top_logprobs,
            )
            request = Request(
                id=f"{response_id}-{len(rows)}",
                prompt=prompt.tokens,
                sampling=sampling,
                max_tokens=limit,
                eos=loaded.tokenizer.eos,
                adapters=ask.adapters,
                session=ask.session,
                speculation=ask.speculation,
                prediction=prediction,
                seeded=ask.seed is not None,
                choice=choice,
                boundaries=prompt.boundaries,
                stop=ask.stop,
                grammar=grammar,
                reasoning_budget=answer_budget(ask.thinking_budget, options, prompt),
            )
            rows.append(
                RowPlan(request, ask.stop, options.reasoning, prompt.reasoning_open, number, tools=tools)
            )
    return tuple(rows)


class Compiling(Protocol):
    """Who has the compiler of grammars."""

    @property
    def grammars(self) -> Grammars: ...


def answer_grammar(
    wish: Grammar | None, options: RowOptions, tools: ToolUse | None, prompt: Prompt, loaded: Compiling
) -> str:
    """The grammar of the answer, compiled; "" if it is free. Raises BadRequest."""
    strict = frozenset(tool["function"]["name"] for tool in options.tools if tool["function"].get("strict"))
    if wish is None and options.tool_choice == "auto" and not strict:
        return ""
    # The compiler's library is not needed before a request asks for a grammar.
    from mantou.chat.grammar.grammars import Setting

    setting = Setting(
        reasoning=options.reasoning,
        reasoning_open=prompt.reasoning_open,
        may_reason=options.thinking is not False,
        tools=tools,
        choice=options.tool_choice,
        tool_name=options.tool_name,
        strict=strict,
    )
    return loaded.grammars.write(wish, setting)


def answer_budget(shared: int | None, options: RowOptions, prompt: Prompt) -> ReasoningBudget | None:
    """The dialect's own field, else the shared one. A model without reasoning keeps every budget."""
    asked = options.thinking_budget if options.thinking_budget is not None else shared
    if asked is None or options.reasoning is None:
        return None
    return options.reasoning.budget(asked, opened=prompt.reasoning_open)


def length_check(loaded: Loaded, config: Config) -> Callable[[str], None]:
    """Refuses a text whose bytes alone prove that it does not fit, before it is tokenised. Raises ContextOverflow."""
    return partial(check_length, loaded.tokenizer, _context(loaded, config), _because(loaded))


def check_length(tokenizer: Tokenizer, context: int, because: str, text: str) -> None:
    if len(text) <= context * _SHORT_TOKEN:
        return
    least = tokenizer.least_tokens(text)
    if least >= context:
        raise ContextOverflow(
            f"The prompt has {len(text)} characters, at least {least} tokens, but the context holds {context} "
            f"with the answer{because}; shorten the prompt or use a model with a longer context."
        )


def _context(loaded: Loaded, config: Config) -> int:
    return min(loaded.info.context_length, config.context_length or loaded.info.context_length)


def _room(prompt: Prompt, loaded: Loaded, config: Config) -> int:
    context = _context(loaded, config)
    room = context - len(prompt.tokens)
    if room <= 0:
        raise ContextOverflow(
            f"The prompt has {len(prompt.tokens)} tokens, but the context holds {context} with the answer"
            f"{_because(loaded)}; shorten the prompt or use a model with a longer context."
        )
    return room


def _because(loaded: Loaded) -> str:
    """Why the context is shorter than the model's own, if it is."""
    reason = loaded.info.extra.get("context_reason")
    return f" ({reason})" if reason else ""


def _check_bias(ask: GenerationAsk, vocab_size: int) -> None:
    for token, _ in ask.logit_bias:
        if token >= vocab_size:
            raise BadRequest(
                f"logit_bias names token {token}, but the vocabulary ends at {vocab_size - 1}.",
                param="logit_bias",
            )


def _check_speculation(ask: GenerationAsk, kinds: Collection[str]) -> None:
    kind = ask.speculation.kind
    if kind is not None and kind != "off" and kind not in kinds:
        raise BadRequest(
            f"speculation.kind {kind!r} is not available; this server has {', '.join(kinds) or 'none'}.",
            param="speculation.kind",
        )


def _check_adapters(ask: GenerationAsk, mounted: Collection[str]) -> None:
    for name in ask.adapters:
        if name not in mounted:
            raise BadRequest(
                f"No adapter called {name!r} is mounted; send the request without it.", param="adapter"
            )
