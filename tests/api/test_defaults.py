"""Who decides a setting that the caller left open. Pure functions, no server."""

from __future__ import annotations

from typing import Any

import pytest

from mantou.api import defaults
from mantou.api.generation_fields import CurveAsk, GenerationAsk, read_generation
from mantou.config import SamplingDefaults
from mantou.data import Sampling, ToneCurve
from mantou.errors import BadRequest

PUBLISHED = {"temperature": 0.9, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


def resolve(
    ask: GenerationAsk | None = None,
    flags: SamplingDefaults | None = None,
    published: dict[str, Any] | None = None,
    **more: Any,
) -> Sampling:
    return defaults.sampling(
        ask or GenerationAsk(), flags or SamplingDefaults(), published or {}, seed=1, vocab_size=100, **more
    )


def test_fallback() -> None:
    assert resolve() == Sampling(temperature=0.7, seed=1)


def test_model_before_fallback() -> None:
    found = resolve(published=PUBLISHED)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.9, 0.95, 20, 1.1)


def test_flags_before_model() -> None:
    flags = SamplingDefaults(temperature=0.0, top_p=0.5, top_k=0)
    found = resolve(flags=flags, published=PUBLISHED)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.0, 0.5, 0, 1.1)


def test_request_before_flags() -> None:
    ask = GenerationAsk(temperature=1.5, top_p=0.0, top_k=3, repetition_penalty=0.0)
    found = resolve(ask, SamplingDefaults(temperature=0.0, top_p=0.5), PUBLISHED)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (1.5, 0.0, 3, 0.0)


@pytest.mark.parametrize(("thinking", "expected"), [(False, 0.7), (True, 0.9), (None, 0.9)])
def test_published_temperature_is_capped_without_thinking(thinking: bool | None, expected: float) -> None:
    assert resolve(published=PUBLISHED, thinking=thinking).temperature == expected


def test_explicit_temperature_is_never_capped() -> None:
    assert resolve(GenerationAsk(temperature=1.2), thinking=False).temperature == 1.2
    assert resolve(flags=SamplingDefaults(temperature=1.2), thinking=False).temperature == 1.2


def test_neutral_values_are_off() -> None:
    found = resolve(GenerationAsk(top_p=1.0, top_k=100, repetition_penalty=1.0, temperature=1e-7))
    assert found == Sampling(temperature=0.0, seed=1)


def test_nulls_and_nonsense_in_the_generation_config_say_nothing() -> None:
    assert resolve(published={"temperature": None, "top_p": "x", "top_k": True}) == resolve()


@pytest.mark.parametrize(
    ("kwargs", "effort", "flag", "expected"),
    [
        ({}, None, None, None),
        ({}, None, False, False),
        ({}, "none", True, False),
        ({}, "minimal", False, True),
        ({"enable_thinking": True}, "none", False, True),
        ({"enable_thinking": False}, "high", True, False),
        ({"other": 1}, None, True, True),
    ],
)
def test_thinking(
    kwargs: dict[str, Any], effort: str | None, flag: bool | None, expected: bool | None
) -> None:
    assert defaults.thinking(kwargs, effort, SamplingDefaults(thinking=flag)) is expected


def test_curve_merges_over_the_servers() -> None:
    flags = SamplingDefaults(tone_curve=ToneCurve(width=1, toe=2))
    assert resolve(flags=flags).tone_curve == ToneCurve(width=1, toe=2)
    assert resolve(GenerationAsk(curve=CurveAsk(True, width=3)), flags).tone_curve == ToneCurve(
        width=3, toe=2
    )
    assert resolve(GenerationAsk(curve=CurveAsk(True, width=3))).tone_curve == ToneCurve(width=3)
    assert resolve(GenerationAsk(curve=CurveAsk(False)), flags).tone_curve is None


@pytest.mark.parametrize(
    ("asked", "flag", "expected"),
    [(None, None, 50), (10, None, 10), (None, 20, 20), (10, 20, 10), (99, None, 50)],
)
def test_max_tokens(asked: int | None, flag: int | None, expected: int) -> None:
    found = defaults.max_tokens(GenerationAsk(max_tokens=asked), SamplingDefaults(max_tokens=flag), 50)
    assert found == expected


def test_session_precedence() -> None:
    headers = {"x-session-affinity": "c", "session_id": "d"}
    assert read_generation({"session_id": "a", "prompt_cache_key": "b"}, headers).session == "a"
    assert read_generation({"prompt_cache_key": "b"}, headers).session == "b"
    assert read_generation({}, headers).session == "c"
    assert read_generation({}, {"session_id": "d"}).session == "d"
    assert read_generation({}, {}).session is None


@pytest.mark.parametrize(
    ("said", "expected"), [("a", ("a",)), ("a+b", ("a", "b")), ("a, b", ("a", "b")), ("none", ()), ("", ())]
)
def test_adapters(said: str, expected: tuple[str, ...]) -> None:
    assert read_generation({"adapter": said}, {}).adapters == expected


def test_hlg_is_on_unless_it_is_said_otherwise() -> None:
    assert read_generation({"hlg": {"width": 2}}, {}).curve == CurveAsk(True, width=2.0)
    assert read_generation({"hlg": {"enabled": False}}, {}).curve == CurveAsk(False)
    with pytest.raises(BadRequest, match=r"hlg\.enabled must be true or false, got a string\."):
        read_generation({"hlg": {"enabled": "on"}}, {})
