"""POST /v1/responses: from a checked body to a prompt and a response. Knows no connection and no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mantou.api import defaults
from mantou.api.fields import Schema
from mantou.api.generation import RowPlan
from mantou.api.openai.logprobs import chat_logprobs
from mantou.api.planning import RowOptions, length_check, plan_rows
from mantou.api.responses.ask import CARRIED, LOGPROBS, ResponsesAsk, ask_schema, read_ask
from mantou.api.responses.conversation import conversation
from mantou.api.responses.fit import fitting
from mantou.api.responses.items import new_id
from mantou.api.responses.stream import ItemWriter
from mantou.api.responses.wire import ResponseBody
from mantou.api.responses.writer import ResponseWriter
from mantou.data import Message, Prompt
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.config import Config


@dataclass(frozen=True, slots=True)
class ResponsesJob:
    """A request that is ready to run."""

    row: RowPlan
    writer: ResponseWriter


class OpenAIResponses:
    """The Responses dialect."""

    path = "/v1/responses"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ResponsesAsk:
        """Checks every field. Raises BadRequest that names the first wrong one."""
        return read_ask(body, headers)

    def plan(self, ask: ResponsesAsk, loaded: Loaded, config: Config, created: int) -> ResponsesJob:
        """Renders the prompt. Raises BadRequest where the model cannot do what is asked."""
        think = defaults.thinking({}, ask.reasoning.effort, config.defaults)
        prompt = _prompt(ask, loaded, config, think)
        name = new_id("resp")
        (row,) = plan_rows(
            ask.generation,
            [prompt],
            _options(ask, loaded, think),
            loaded=loaded,
            config=config,
            response_id=name,
        )
        items = ItemWriter(
            ask.toolbox,
            most_calls=ask.max_tool_calls,
            carries_reasoning=CARRIED in ask.include,
            read_logprobs=(lambda rows: chat_logprobs(loaded.tokenizer, rows).content or [])
            if LOGPROBS in ask.include
            else None,
        )
        return ResponsesJob(row, ResponseWriter(_body(ask, row, loaded, name, created), items))

    def schema(self) -> Schema:
        """The body as a JSON schema."""
        return ask_schema()


def _prompt(ask: ResponsesAsk, loaded: Loaded, config: Config, think: bool | None) -> Prompt:
    offered = ask.toolbox.offered
    if offered and not loaded.template.supports_tools:
        raise BadRequest(
            "The chat template of this model cannot describe tools; use a model that can, or leave tools out.",
            param="tools",
        )
    kwargs: dict[str, Any] = {} if think is None else {"enable_thinking": think}
    if ask.reasoning.effort not in (None, "none"):
        kwargs["reasoning_effort"] = ask.reasoning.effort

    def render(messages: Sequence[Message], check: Callable[[str], None] = lambda text: None) -> Prompt:
        return loaded.template.render(messages, tools=offered or None, kwargs=kwargs, check=check)

    messages = conversation(ask.items, ask.instructions)
    if ask.truncation == "disabled":
        return render(messages, length_check(loaded, config))
    context = min(loaded.info.context_length, config.context_length or loaded.info.context_length)
    return fitting(messages, render, context, ask.generation.max_tokens)


def _options(ask: ResponsesAsk, loaded: Loaded, think: bool | None) -> RowOptions:
    logprobs = LOGPROBS in ask.include
    choice = ask.toolbox.choice
    return RowOptions(
        thinking=think if loaded.template.supports_thinking else None,
        reasoning=loaded.template.reasoning,
        logprobs=logprobs,
        top_logprobs=ask.top_logprobs if logprobs else 0,
        tools=ask.toolbox.enforced,
        parallel_tools=ask.parallel_tools and ask.max_tool_calls != 1,
        tool_choice=choice.kind if choice.kind != "none" else "auto",
        tool_name=choice.name,
        grammar=ask.grammar,
    )


def _body(ask: ResponsesAsk, row: RowPlan, loaded: Loaded, response_id: str, created: int) -> ResponseBody:
    """The response before anything was said, with the numbers it will be drawn with."""
    sampling = row.request.sampling
    return ResponseBody(
        id=response_id,
        created_at=created,
        completed_at=None,
        status="queued" if ask.background else "in_progress",
        error=None,
        incomplete_details=None,
        model=loaded.info.id,
        output=[],
        usage=None,
        previous_response_id=ask.previous,
        instructions=ask.instructions,
        tools=ask.toolbox.echoes(),
        tool_choice=ask.toolbox.choice_echo
        if isinstance(ask.toolbox.choice_echo, str)
        else dict(ask.toolbox.choice_echo),
        parallel_tool_calls=ask.parallel_tools,
        max_tool_calls=ask.max_tool_calls,
        text=ask.text,
        reasoning=ask.reasoning,
        truncation=ask.truncation,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_logprobs=ask.top_logprobs,
        max_output_tokens=ask.generation.max_tokens,
        store=ask.store is not False,
        background=ask.background,
        metadata=dict(ask.metadata),
        prompt_cache_key=ask.prompt_cache_key,
        safety_identifier=ask.safety_identifier,
        user=ask.user,
    )
