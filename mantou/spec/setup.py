"""From flags to a draft provider. Knows every kind by name, so that nobody else has to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mantou.config import Config
from mantou.errors import ConfigError
from mantou.kv.budget import KVBudget
from mantou.protocols import DraftProvider
from mantou.spec.compose import OFF, AdaptiveWidth, ByKind, FirstOf
from mantou.spec.cost import StepCosts
from mantou.spec.heads.kinds import HEADS, MODEL, MTP
from mantou.spec.ngram import NGram
from mantou.spec.none import NoDraft

AUTO = "auto"  # of a draft model: as its weights say
FILL_MODES = ("strict", "echo")
VERIFY_MODES = ("agree", "rejection")
_PAUSE = 8  # steps without a guess after one in which none paid, where a guess interrupts the pipeline
_ECHO_LEAST = 6  # tokens that must agree before a span counts as a copy of what was said before


_LOADED = (AUTO, MODEL, *HEADS)  # kinds that --draft-model may be; the model itself brings one of them


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """What --draft-model turned out to be."""

    kind: str
    provider: DraftProvider
    note: str
    kept: KVBudget | None = None  # what it keeps of each row
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drafting:
    """The provider, and what the ready card and requests may say of it."""

    provider: DraftProvider
    kinds: tuple[str, ...]  # what a request may ask for
    default: str
    note: str  # for people
    kept: KVBudget | None = None
    weights_bytes: int = 0  # beside the model's own


def check(config: Config) -> None:
    """Raises ConfigError for flags of drafts that contradict each other."""
    if config.ngram_max < config.ngram_min:
        raise ConfigError(
            f"--ngram-max {config.ngram_max} is below --ngram-min {config.ngram_min}; raise it or lower the other."
        )
    if config.fill is not None and config.fill not in FILL_MODES:
        raise ConfigError(
            f"MANTOU_FILL takes strict or echo, not {config.fill!r}; unset it to turn fill off."
        )
    if config.draft_verify not in VERIFY_MODES:
        raise ConfigError(f"--draft-verify takes {' or '.join(VERIFY_MODES)}, not {config.draft_verify!r}.")
    kinds = _asked(config, OFF)
    known = ("ngram", *_LOADED, OFF)
    for kind in kinds:
        if kind not in known:
            raise ConfigError(
                f"--draft-kind takes {', '.join(known)}, or several as ngram,model; not {kind!r}."
            )
    if OFF in kinds and len(kinds) > 1:
        raise ConfigError("--draft-kind off stands alone.")
    loaded = [kind for kind in kinds if kind in _LOADED]
    if config.mtp and config.draft_model is not None:
        raise ConfigError("--mtp on guesses with the model's own layer; leave it out, or --draft-model.")
    if MTP in loaded and config.mtp is False:
        raise ConfigError("--draft-kind mtp asks for what --mtp off turns off; leave one of them out.")
    if loaded and loaded != [MTP] and config.draft_model is None:
        raise ConfigError(
            f"--draft-kind {loaded[0]} needs --draft-model, the small model or head that makes the drafts."
        )
    if len(loaded) > 1:
        raise ConfigError(f"--draft-model is one of {' and '.join(loaded)}, not both; name one, or auto.")


def _asked(config: Config, usual: str) -> tuple[str, ...]:
    if config.draft_kind is not None:
        return tuple(part.strip() for part in config.draft_kind.split(",") if part.strip()) or (OFF,)
    return (AUTO,) if config.draft_model is not None else (usual,)


def make_drafting(
    config: Config,
    costs: Callable[[], StepCosts],
    load_model: Callable[[str], LoadedDraft],
    load_own: Callable[[], LoadedDraft | None],
    *,
    pipelined: bool,
) -> Drafting:
    """The provider that the flags ask for. Without flags it copies earlier text, but not where steps are pipelined: a
    row that guesses waits for the host, and what that costs was not measured on such devices yet.

    `costs` measures a decode step; `load_model(kind)` loads the draft model, `load_own()` the model's own prediction
    layer, None if it has none. Raises ConfigError, and ModelError for a draft model that does not fit.
    """
    check(config)
    own = load_own() if config.draft_model is None and config.mtp is not False else None
    usual = OFF if pipelined else "ngram"
    asked = _asked(config, usual if own is None else own.kind)
    if own is None and (config.mtp or (MTP in asked and config.draft_model is None)):
        raise ConfigError(
            "--mtp on needs a model with a multi-token-prediction layer that mantou can use, and this one has none; "
            "leave it out."
        )
    plain: dict[str, DraftProvider] = {"ngram": _ngram(config)}
    loaded = own
    words = {"ngram": f"copies after {config.ngram_min} to {config.ngram_max} equal tokens"}
    if config.draft_model is not None:
        loaded = load_model(next((kind for kind in asked if kind in _LOADED), AUTO))
        asked = tuple(loaded.kind if kind in _LOADED else kind for kind in asked)
    if loaded is not None:
        plain[loaded.kind], words[loaded.kind] = loaded.provider, loaded.note
    default = ",".join(asked)
    kinds: dict[str, DraftProvider] = {OFF: NoDraft(), **plain}
    if len(asked) > 1:
        kinds[default] = FirstOf(*(plain[kind] for kind in asked))
    chosen: DraftProvider = ByKind(kinds, default)
    if config.fill == "echo":
        echo = NGram(_ECHO_LEAST, max(_ECHO_LEAST, 16), config.num_draft_tokens or 10, kind="echo")
        chosen = FirstOf(echo, chosen)
    table = costs()
    note = ", then ".join(words[kind] for kind in asked if kind != OFF) or "none unless a request asks"
    adaptive = AdaptiveWidth(chosen, table, pause=_PAUSE if pipelined else 0)
    note = f"{note}; {_step_note(table)}"
    kept, num_bytes = (None, 0) if loaded is None else (loaded.kept, loaded.weights_bytes)
    return Drafting(adaptive, tuple(kinds), default, note, kept, num_bytes)


def _ngram(config: Config) -> NGram:
    return NGram(config.ngram_min, config.ngram_max, config.num_draft_tokens or 10)


def _step_note(costs: StepCosts) -> str:
    one, many = costs.seconds(1, 1), costs.seconds(1, 5)
    return f"checking 4 drafted tokens takes {many / one:.1f} x the time of a step"


def vocabulary_fault(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """Why a draft model's tokens are not the target's, or None. Ids that only one of them has are padding."""
    for token, number in draft.items():
        theirs = target.get(token)
        if theirs is not None and theirs != number:
            return f"{token!r} is token {number} there and token {theirs} here"
    shared = len(target.keys() & draft.keys())
    if shared * 20 < 19 * min(len(target), len(draft)):
        return f"only {shared} of {len(draft)} tokens are known here"
    return None
