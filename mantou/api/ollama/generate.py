"""POST /api/chat and /api/generate, Ollama's own API: parse, plan. Knows no engine and no connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mantou.api import shapes
from mantou.api.fields import Boolean, Field, Schema, Shaped, Text, wrong
from mantou.api.generation_fields import GenerationAsk
from mantou.api.ollama.fields import MESSAGES, Shared, read_images, read_shared, shared_schema
from mantou.api.ollama.wire import OllamaEncoder, Style
from mantou.api.openai.messages import num_characters, read_tools
from mantou.api.planning import Job, RowOptions, length_check, plan_rows
from mantou.data import Message, Prompt
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.config import Config


@dataclass(frozen=True, slots=True)
class OllamaAsk:
    """A checked body of either route. `raw`: the prompt as it is; neither prompt nor messages: load the model."""

    style: Style
    shared: Shared
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    raw: str | None = None

    @property
    def generation(self) -> GenerationAsk:
        return self.shared.generation

    @property
    def num_characters(self) -> int:
        return num_characters(self.messages) + len(self.raw or "")

    @property
    def compiles(self) -> bool:
        return self.shared.grammar is not None or bool(self.tools)


def _nothing(value: Any, name: str) -> None:
    """For what only an empty value is supported of."""
    if value not in ("", []):
        raise BadRequest(_WITHOUT[name], param=name)


def _system(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


_WITHOUT = {
    "suffix": "suffix is not supported: this server completes from the left only; leave it out.",
    "template": "template is not supported: the model's own is used; send raw with the whole prompt instead.",
    "context": "context is not supported; send the conversation to /api/chat, whose prefix is cached anyway.",
}
_TOOLS = Shaped("tools", "Functions the model may call.", read_tools, shapes.TOOLS)
_PROMPT = Text("prompt", "What to answer; empty = load the model.")
_SYSTEM = Shaped("system", "The system message.", _system, {"type": ["string", "null"]})
_RAW = Boolean("raw", "Send the prompt to the model as it is, without its template.")
_IMAGES = Shaped(
    "images", "Needs a model with vision.", read_images, {"type": ["array", "null"], "maxItems": 0}
)
_EMPTY = tuple(
    Shaped(name, "Not supported: only empty.", _nothing, {"type": kinds, **empty})
    for name, kinds, empty in (
        ("suffix", ["string", "null"], {"maxLength": 0}),
        ("template", ["string", "null"], {"maxLength": 0}),
        ("context", ["array", "null"], {"maxItems": 0}),
    )
)
_GENERATE: tuple[Field[Any], ...] = (_PROMPT, _SYSTEM, _RAW, _IMAGES, *_EMPTY)


class OllamaChat:
    """Ollama's chat."""

    path = "/api/chat"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> OllamaAsk:
        """Checks every field. Raises BadRequest that names the first wrong one."""
        messages = MESSAGES.read(body) or ()
        return OllamaAsk("chat", read_shared(body, headers), messages, _TOOLS.read(body) or ())

    def plan(self, ask: OllamaAsk, loaded: Loaded, config: Config, fingerprint: str, created: int) -> Job:
        """Renders the prompt. Raises BadRequest where the model cannot do what is asked."""
        return _plan(ask, loaded, config)

    def schema(self) -> Schema:
        """The body as a JSON schema."""
        return shared_schema((MESSAGES, _TOOLS))


class OllamaGenerate:
    """Ollama's completion."""

    path = "/api/generate"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> OllamaAsk:
        """Checks every field. Raises BadRequest that names the first wrong one."""
        prompt, system = _PROMPT.read(body) or "", _SYSTEM.read(body)
        for entry in (_IMAGES, *_EMPTY):
            entry.read(body)
        shared = read_shared(body, headers)
        if _RAW.read(body):
            return OllamaAsk("generate", shared, raw=prompt or None)
        if not prompt:
            return OllamaAsk("generate", shared)
        spoken = (Message("system", system),) if system else ()
        return OllamaAsk("generate", shared, (*spoken, Message("user", prompt)))

    def plan(self, ask: OllamaAsk, loaded: Loaded, config: Config, fingerprint: str, created: int) -> Job:
        """Renders the prompt, or takes it as it is. Raises BadRequest where the model cannot do what is asked."""
        return _plan(ask, loaded, config)

    def schema(self) -> Schema:
        """The body as a JSON schema."""
        return shared_schema(_GENERATE)


def _plan(ask: OllamaAsk, loaded: Loaded, config: Config) -> Job:
    if ask.raw is None and not ask.messages:
        return Job((), OllamaEncoder(loaded.info.id, ask.style, load=True))
    think = _thinking(ask, loaded, config)
    check = length_check(loaded, config)
    if ask.raw is not None:
        check(ask.raw)
        tokens = tuple(loaded.tokenizer.encode(ask.raw, add_special_tokens=True))
        prompt = Prompt(tokens, ask.raw)
        options = RowOptions(grammar=ask.shared.grammar)
    else:
        prompt = _rendered(ask, loaded, think, check)
        options = RowOptions(
            thinking=think if loaded.template.supports_thinking else None,
            reasoning=loaded.template.reasoning,
            tools=ask.tools,
            grammar=ask.shared.grammar,
        )
    response_id = f"ollama-{uuid4()}"
    rows = plan_rows(ask.generation, [prompt], options, loaded=loaded, config=config, response_id=response_id)
    return Job(rows, OllamaEncoder(loaded.info.id, ask.style))


def _thinking(ask: OllamaAsk, loaded: Loaded, config: Config) -> bool | None:
    asked = ask.shared.think
    if asked and not loaded.template.supports_thinking and loaded.template.reasoning is None:
        raise BadRequest("This model does not think; leave think out.", param="think")
    return config.defaults.thinking if asked is None else bool(asked)


def _rendered(ask: OllamaAsk, loaded: Loaded, think: bool | None, check: Callable[[str], None]) -> Prompt:
    if ask.tools and not loaded.template.supports_tools:
        raise BadRequest(
            "The chat template of this model cannot describe tools; use a model that can, or leave tools out.",
            param="tools",
        )
    kwargs: dict[str, Any] = {} if think is None else {"enable_thinking": think}
    if isinstance(ask.shared.think, str):
        kwargs["reasoning_effort"] = ask.shared.think
    return loaded.template.render(ask.messages, tools=ask.tools or None, kwargs=kwargs, check=check)
