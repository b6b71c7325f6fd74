"""positive_data_acceptance for schemathesis, with the reasons for which a body that fits its schema may be refused.

A JSON schema cannot say that a text is a grammar, that two fields agree, or what the served model has. Every other
refusal of a body that fits fails the run: then the document and the readers disagree.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

_FORMAT = r"(response_format|text\.format|output_config\.format|output_format|format|structured_outputs|guided_\w+)\S*"
REASONS = (
    # A text that has to be a grammar, a regex, a JSON schema, JSON, or the base64 of a text file.
    rf"{_FORMAT} (cannot be used|requires text without end|is a string that is not JSON|is not GBNF)",
    rf"{_FORMAT} is false, which nothing can match",
    rf"{_FORMAT} (has|nests|counts|repeats|holds) ",
    r"tools \(.*\) (cannot be used|requires text without end|has a pattern)",
    r"The arguments of tool call ",
    # Two fields that have to agree.
    r"\S+ and \S+ both say what the answer must be",
    r"tool_choice (names the tool|required needs at least one|any needs at least one)",
    r"tools names .* twice",
    r"messages is empty; send at least one message of the user",
    r"messages ends with a tool call",
    r"\S+tool_use_id names no tool_use",
    r"\S+call_id .* names no call of an earlier item",
    r"input holds nothing to answer; send at least one message",
    r"input is missing; send the items of the conversation, or previous_response_id",
    r"\S+encrypted_content was not made by this server",
    r"thinking\.budget_tokens must be less than max_tokens",
    r"\d+ prompts x n = \d+ is more than",
    r"logprobs of an echoed prompt",
    r"best_of ",
    r"text_1 has \d+ texts",
    r"background needs a response that is stored",
    # What this server, or the model that it serves, has.
    r"No adapter called",
    r"speculation\.kind .* is not available",
    r"Item with id .* not found",
    r"prompt holds a token id outside the vocabulary",
    r"logit_bias names token",
    r"The prompt has \d+ (tokens|characters), .*the context holds",
    r"fake/bytes-1B generates text and is no embedding model",
    r"Only responses made with background can be streamed again",
    # Bounds of the whole body, which a schema of its parts cannot have.
    r"\S+ is nested more than \d+ levels deep",
)
_KNOWN = re.compile("|".join(f"(?:{reason})" for reason in REASONS), re.DOTALL)


@schemathesis.check
def accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """Raises a Failure for a refusal without one of the reasons."""
    if response.status_code == 400 and _KNOWN.match(_message(response)):
        return None
    return positive_data_acceptance(ctx, response, case)


def _message(response: Any) -> str:
    """OpenAI's and Anthropic's errors have an object, Ollama's a text."""
    error = response.json().get("error")
    return error.get("message", "") if isinstance(error, dict) else str(error)
