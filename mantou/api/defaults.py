"""Who decides a setting: the request, then the server's flags, then the model, then a fallback. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mantou.api.generation_fields import CurveAsk, GenerationAsk
from mantou.config import SamplingDefaults
from mantou.data import Sampling, ToneCurve

FALLBACK_TEMPERATURE = 0.7
# Models that think publish the temperature of their thinking mode; without thinking it is too high.
NO_THINKING_TEMPERATURE = 0.7
# In float32 a draw below this temperature is the most likely token, and 1 / temperature can overflow.
GREEDY_BELOW = 1e-4


def thinking(kwargs: Mapping[str, Any], effort: str | None, flags: SamplingDefaults) -> bool | None:
    """Whether the model should think: chat_template_kwargs, reasoning_effort, the flag; None = as the model likes."""
    asked = kwargs.get("enable_thinking")
    if isinstance(asked, bool):
        return asked
    if effort is not None:
        return effort != "none"
    return flags.thinking


def sampling(
    ask: GenerationAsk,
    flags: SamplingDefaults,
    published: Mapping[str, Any],
    *,
    seed: int,
    vocab_size: int,
    thinking: bool | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Sampling:
    """The sampling of one sequence. `published` is the model's generation_config.json, `seed` the sequence's own.

    Neutral values become 0 (= off), so that a sequence that asks for nothing takes the cheapest path.
    """
    top_k = int(_first(ask.top_k, flags.top_k, _number(published, "top_k"), 0))
    unset = Sampling()
    return Sampling(
        temperature=_temperature(ask, flags, published, thinking),
        top_p=_off_at_one(_first(ask.top_p, flags.top_p, _number(published, "top_p"), 0.0)),
        top_k=0 if top_k >= vocab_size else max(top_k, 0),
        min_p=_first(ask.min_p, 0.0),
        xtc_probability=_first(ask.xtc_probability, 0.0),
        xtc_threshold=_first(ask.xtc_threshold, 0.0),
        logit_bias=ask.logit_bias,
        repetition_penalty=_off_at_one(
            _first(ask.repetition_penalty, _number(published, "repetition_penalty"), 0.0)
        ),
        repetition_context_size=int(_first(ask.repetition_context_size, unset.repetition_context_size)),
        presence_penalty=_first(ask.presence_penalty, 0.0),
        presence_context_size=int(_first(ask.presence_context_size, unset.presence_context_size)),
        frequency_penalty=_first(ask.frequency_penalty, 0.0),
        frequency_context_size=int(_first(ask.frequency_context_size, unset.frequency_context_size)),
        tone_curve=_tone_curve(ask.curve, flags.tone_curve),
        seed=seed,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def max_tokens(ask: GenerationAsk, flags: SamplingDefaults, room: int) -> int:
    """Tokens that may be generated where the context has room for `room` more."""
    asked = ask.max_tokens if ask.max_tokens is not None else flags.max_tokens
    return room if asked is None else min(asked, room)


def _temperature(
    ask: GenerationAsk, flags: SamplingDefaults, published: Mapping[str, Any], thinking: bool | None
) -> float:
    said = ask.temperature if ask.temperature is not None else flags.temperature
    if said is None:
        said = _first(_number(published, "temperature"), FALLBACK_TEMPERATURE)
        if thinking is False:
            said = min(said, NO_THINKING_TEMPERATURE)
    return 0.0 if said < GREEDY_BELOW else said


def _tone_curve(ask: CurveAsk | None, server: ToneCurve | None) -> ToneCurve | None:
    if ask is None:
        return server
    if not ask.enabled:
        return None
    base = server or ToneCurve()
    return ToneCurve(
        width=_first(ask.width, base.width),
        shoulder=_first(ask.shoulder, base.shoulder),
        toe=_first(ask.toe, base.toe),
        pivot_offset=_first(ask.pivot_offset, base.pivot_offset),
    )


def _first(*values: float | None) -> float:
    """The first value that was given; the last one always is."""
    return next(value for value in values if value is not None)


def _number(published: Mapping[str, Any], name: str) -> float | None:
    """A published setting. Authors also write null there, which says nothing."""
    value = published.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _off_at_one(value: float) -> float:
    return 0.0 if value == 1.0 else value
