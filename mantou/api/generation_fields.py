"""Fields that every text-generation route shares, read into one value. Knows no dialect, no model and no defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mantou.api import shapes
from mantou.api.fields import HUGE, Boolean, Field, Integer, Number, Object, Shaped, Text, kind_of, wrong
from mantou.api.structured import EXTENSIONS, read_extensions
from mantou.data import Grammar, Speculation
from mantou.errors import BadRequest

MAX_STOPS = 4
MAX_CHOICES = 16


_AS_SERVED = Speculation()


@dataclass(frozen=True, slots=True)
class CurveAsk:
    """The `hlg` object: None = keep the server's value."""

    enabled: bool
    width: float | None = None
    shoulder: float | None = None
    toe: float | None = None
    pivot_offset: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationAsk:
    """What the caller said about generation. None = the caller is silent."""

    stream: bool = False
    include_usage: bool | None = None  # None = no stream_options at all
    n: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    curve: CurveAsk | None = None
    adapters: tuple[str, ...] = ()
    session: str | None = None
    speculation: Speculation = _AS_SERVED
    grammar: Grammar | None = None  # structured_outputs and guided_*
    thinking_budget: int | None = None


def _stop(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, str | list):
        raise wrong(name, "a string or a list of strings", value)
    found: list[Any] = [value] if isinstance(value, str) else value
    for index, entry in enumerate(found):
        if not isinstance(entry, str):
            raise BadRequest(f"{name}[{index}] must be a string, got {kind_of(entry)}.", param=name)
    if len(found) > MAX_STOPS:  # empty ones count, as the document says
        raise BadRequest(f"{name} may hold at most {MAX_STOPS} sequences, got {len(found)}.", param=name)
    return tuple(entry for entry in found if entry)


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise wrong(name, "an object of token id to number", value)
    entries: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise BadRequest(
                f"{name} needs token ids as keys, and one of them is not a whole number.", param=name
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise BadRequest(f"{name}[{key}] must be a number, got {kind_of(bias)}.", param=name)
        if not -HUGE <= bias <= HUGE:
            raise BadRequest(f"{name}[{key}] must be between {-HUGE:g} and {HUGE:g}.", param=name)
        entries.append((int(key), float(bias)))
    return tuple(entries)


def _adapters(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    parts = tuple(part.strip() for part in re.split(r"[+,]", value) if part.strip())
    return () if parts == ("none",) else parts


def _speculation(value: Any, name: str) -> Speculation:
    if value is False:
        return Speculation(kind="off")
    if not isinstance(value, dict):
        raise wrong(name, "an object or false", value)
    try:
        kind, most = DRAFT_KIND.read(value), NUM_DRAFT_TOKENS.read(value)
    except BadRequest as error:
        raise BadRequest(f"{name}.{error.message}", param=f"{name}.{error.param}") from None
    return Speculation(kind, most)


def _prediction(value: Any, name: str) -> str:
    """OpenAI's predicted output: {"type": "content", "content": text or text parts}."""
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    content = value.get("content")
    parts: list[Any] = content if isinstance(content, list) else [content]
    said = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in said if isinstance(text, str)]
    if value.get("type", "content") != "content" or len(texts) < len(said):
        raise BadRequest(
            f"{name} must be of type content, its content a string or a list of text parts.", param=name
        )
    return "".join(texts)


_CURVE = (
    Boolean("enabled", "Whether the curve is used; true unless it is said otherwise."),
    Number("width", "Half width of the straight part, in nats.", 0),
    Number("shoulder", "Roll-off above the straight part, in nats; 0 = none.", 0),
    Number("toe", "Roll-off below the straight part, in nats; 0 = none.", 0),
    Number("pivot_offset", "How far the pivot lies below the most likely token, in nats."),
)


def _curve(value: Any, name: str) -> CurveAsk:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    try:
        said: dict[str, Any] = {entry.name: entry.read(value) for entry in _CURVE}
    except BadRequest as error:
        raise BadRequest(f"{name}.{error.message}", param=f"{name}.{error.param}") from None
    enabled = said.pop("enabled") is not False
    return CurveAsk(enabled=enabled, **said)


STREAM = Boolean("stream", "Send the answer as server-sent events while it is made.")
STREAM_OPTIONS = Object(
    "stream_options",
    "`include_usage`: send usage in a chunk of its own before the end.",
    shapes.STREAM_OPTIONS,
)
N = Integer("n", "How many answers; answer i uses seed + i.", 1, MAX_CHOICES)
STOP = Shaped(
    "stop",
    f"Up to {MAX_STOPS} strings that end the answer and are not part of it; empty ones are ignored.",
    _stop,
    shapes.STOPS,
)
MAX_TOKENS = Integer(
    "max_tokens", "Most tokens to generate; silent = until the model ends or the context is full.", 1
)
MAX_COMPLETION_TOKENS = Integer("max_completion_tokens", "The same as max_tokens, and wins over it.", 1)
CURVE = Shaped(
    "hlg",
    "Tone curve on log-probabilities in place of the other samplers; merged over the server's own.",
    _curve,
    {"type": ["object", "null"], "properties": {entry.name: entry.schema() for entry in _CURVE}},
)
LOGIT_BIAS = Shaped(
    "logit_bias",
    "Token id (as a string) to a number that is added to its logit.",
    _logit_bias,
    shapes.LOGIT_BIAS,
)
ADAPTER = Shaped(
    "adapter", "An adapter's id, several as a+b, or none.", _adapters, {"type": ["string", "null"]}
)
DRAFT_KIND = Text("kind", "Who guesses: one of the kinds this server has, or off.")
NUM_DRAFT_TOKENS = Integer("num_draft_tokens", "Most tokens guessed at once.", 1, 64)
SPECULATION = Shaped(
    "speculation",
    "How tokens are guessed ahead; false = not at all. The answer is the same in every case.",
    _speculation,
    shapes.either(
        {
            "type": ["object", "null"],
            "properties": {entry.name: entry.schema() for entry in (DRAFT_KIND, NUM_DRAFT_TOKENS)},
        },
        {"const": False},
    ),
)
PREDICTION = Shaped(
    "prediction",
    "Text that the answer is expected to repeat in large parts: it comes faster where it does.",
    _prediction,
    shapes.PREDICTION,
)
MODEL = Text("model", "Ignored: the server answers with the model it has loaded.")

# Read straight into the attribute of the same name.
_PLAIN: tuple[Field[Any], ...] = (
    Integer("seed", "Makes the draw repeatable; any whole number."),
    Number("temperature", "0 = always the most likely token.", 0),
    Number("top_p", "Smallest set of tokens whose probability exceeds this; 0 or 1 = off.", 0, 1),
    Integer("top_k", "Only the k most likely tokens; 0 = off.", 0),
    Number("min_p", "Drops tokens below this share of the best one's probability; 0 = off.", 0, 1),
    Number("xtc_probability", "How often the most likely tokens are left out; 0 = never.", 0, 1),
    Number("xtc_threshold", "Probability from which xtc leaves a token out.", 0, 0.5),
    Number("repetition_penalty", "Divides the logits of seen tokens; 0 or 1 = off.", 0),
    Integer("repetition_context_size", "How many last tokens count as seen; 0 = all.", 0, 10**9),
    Number("presence_penalty", "Taken once from the logit of a seen token."),
    Integer("presence_context_size", "How many last tokens count as seen; 0 = all.", 0, 10**9),
    Number("frequency_penalty", "Taken from the logit of a seen token for each time it was seen."),
    Integer("frequency_context_size", "How many last tokens count as seen; 0 = all.", 0, 10**9),
)
THINKING_BUDGET = Integer(
    "thinking_budget",
    "Most tokens of reasoning: there it is ended, and the answer begins. The closing tag comes on top.",
    0,
)
_BUDGETS = (
    THINKING_BUDGET,
    Integer("thinking_token_budget", "The same as thinking_budget, and gives way to it.", 0),
)
_SESSION = (
    Text("session_id", "Keeps the prompt cache of one conversation together."),
    Text("prompt_cache_key", "The same as session_id, and gives way to it."),
)

TABLE: tuple[Field[Any], ...] = (
    MODEL,
    STREAM,
    STREAM_OPTIONS,
    N,
    STOP,
    MAX_TOKENS,
    MAX_COMPLETION_TOKENS,
    *_PLAIN,
    LOGIT_BIAS,
    CURVE,
    ADAPTER,
    SPECULATION,
    *_BUDGETS,
    *_SESSION,
    *EXTENSIONS,
)


def read_generation(body: Mapping[str, Any], headers: Mapping[str, str]) -> GenerationAsk:
    """Reads and checks every shared field. Raises BadRequest that names the first field that is wrong."""
    MODEL.read(body)
    cap, old_cap = MAX_COMPLETION_TOKENS.read(body), MAX_TOKENS.read(body)
    plain = {entry.name: entry.read(body) for entry in _PLAIN}
    return GenerationAsk(
        stream=STREAM.read(body) or False,
        include_usage=_include_usage(body),
        n=N.read(body) or 1,
        stop=STOP.read(body) or (),
        max_tokens=cap if cap is not None else old_cap,
        logit_bias=LOGIT_BIAS.read(body) or (),
        curve=CURVE.read(body),
        adapters=ADAPTER.read(body) or (),
        session=read_session(body, headers),
        speculation=SPECULATION.read(body) or Speculation(),
        grammar=read_extensions(body),
        thinking_budget=read_budget(body),
        **plain,
    )


def _include_usage(body: Mapping[str, Any]) -> bool | None:
    options = STREAM_OPTIONS.read(body)
    if options is None:
        return None
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise wrong("stream_options.include_usage", "true or false", value)
    return value or False


def read_budget(body: Mapping[str, Any]) -> int | None:
    """Most tokens of reasoning; None = as the model likes. Raises BadRequest."""
    return next((value for entry in _BUDGETS if (value := entry.read(body)) is not None), None)


def read_session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The first that is set of: the two body fields, the two headers."""
    said = [entry.read(body) for entry in _SESSION]
    said += [headers.get("x-session-affinity"), headers.get("session_id")]
    return next((value for value in said if value), None)
