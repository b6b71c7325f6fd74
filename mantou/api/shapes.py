"""JSON schemas of nested values, for /openapi.json: messages, tools, formats of an answer. Knows no reader.

They say what the readers accept, as far as a schema can; tests/api/test_schemathesis.py holds both against each other.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
MAYBE_BOOLEAN: Schema = {"type": ["boolean", "null"]}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
SCHEMA: Schema = {"type": ["object", "boolean"]}  # of JSON


def record(needed: Schema, optional: Schema | None = None) -> Schema:
    """An object with these members; further ones are ignored."""
    return {"type": "object", "required": list(needed), "properties": {**needed, **(optional or {})}}


def either(*options: Schema) -> Schema:
    return {"anyOf": list(options)}


def listed(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}


def word(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


TEXT_PARTS = listed(
    either(
        record({"type": word("text"), "text": TEXT}),
        record({"type": word("refusal"), "refusal": TEXT}),
    )
)
CONTENT = either(TEXT, TEXT_PARTS)

# ------------------------------------------------------------------ chat
_NAMED: Schema = {"name": MAYBE_TEXT, "tool_call_id": MAYBE_TEXT}
_CALL = record(
    {"function": record({"name": TEXT}, {"arguments": {"type": ["string", "object", "null"]}})},
    {"id": MAYBE_TEXT},
)
_SPOKEN: Schema = {
    **_NAMED,
    "reasoning": MAYBE_TEXT,
    "reasoning_content": MAYBE_TEXT,
    "tool_calls": either(listed(_CALL), NULL),
}
CHAT_MESSAGE = either(
    record({"role": word("system", "developer", "user"), "content": CONTENT}, _SPOKEN),
    record(
        {"role": word("assistant")},
        {**_SPOKEN, "content": either(CONTENT, NULL)},
    ),
    record({"role": word("tool")}, {**_SPOKEN, "content": either(CONTENT, NULL)}),
)
CHAT_MESSAGES = listed(CHAT_MESSAGE, minItems=1)
_FUNCTION = record(
    {"name": TEXT},
    {"description": MAYBE_TEXT, "parameters": {"type": ["object", "null"]}, "strict": MAYBE_BOOLEAN},
)
TOOLS = either(listed(record({"type": word("function"), "function": _FUNCTION})), NULL)
_NAMED_FUNCTION = record({"type": word("function"), "function": record({"name": TEXT})})
TOOL_CHOICE = either(
    word("none", "auto", "required"),
    _NAMED_FUNCTION,
    record(
        {
            "type": word("allowed_tools"),
            "allowed_tools": record({"mode": word("auto", "required"), "tools": listed(_NAMED_FUNCTION)}),
        }
    ),
    NULL,
)

# ------------------------------------------------------------------ what an answer is
CHOICES = listed(SOME_TEXT, minItems=1, maxItems=1000)
_FORMATS = (
    record({"type": word("text", "json_object")}),
    record({"type": word("regex"), "regex": SOME_TEXT}),
    record({"type": word("lark"), "lark": SOME_TEXT}),
    record({"type": word("choice"), "choice": CHOICES}),
)
_STRICT: Schema = {"strict": MAYBE_BOOLEAN}
RESPONSE_FORMAT = either(
    *_FORMATS,
    record({"type": word("json_schema"), "json_schema": record({"schema": SCHEMA}, _STRICT)}),
    NULL,
)
# With the schema beside its type.
FLAT_FORMAT = either(
    *_FORMATS, record({"type": word("json_schema"), "schema": SCHEMA}, {**_STRICT, "json_schema": NULL}), NULL
)
STRUCTURED_OUTPUTS: Schema = {
    "type": ["object", "null"],
    "properties": {
        "json": either(SCHEMA, NULL),
        "regex": either(SOME_TEXT, NULL),
        "choice": either(CHOICES, NULL),
        "grammar": either(SOME_TEXT, NULL),
        "json_object": MAYBE_BOOLEAN,
    },
    "additionalProperties": {"enum": [None, False]},
}
STOPS = either(TEXT, listed(TEXT, maxItems=4), NULL)
STREAM_OPTIONS: Schema = {"type": ["object", "null"], "properties": {"include_usage": MAYBE_BOOLEAN}}
PREDICTION = either(
    record(
        {"content": either(TEXT, listed(either(TEXT, record({"text": TEXT}))))},
        {"type": word("content")},
    ),
    NULL,
)
LOGIT_BIAS: Schema = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -1e9, "maximum": 1e9},
}
TOKENS = listed({"type": "integer", "minimum": 0}, minItems=1)
PROMPT = either(SOME_TEXT, TOKENS, listed(either(SOME_TEXT, TOKENS), minItems=1))

# ------------------------------------------------------------------ Anthropic
_TEXT_BLOCK = record({"type": word("text"), "text": TEXT})
_SEARCH_RESULT = record(
    {"type": word("search_result"), "title": TEXT, "source": TEXT, "content": listed(_TEXT_BLOCK)}
)
_SOURCE = either(
    record({"type": word("text"), "data": TEXT}),
    record({"type": word("content"), "content": either(TEXT, listed(_TEXT_BLOCK))}),
)
_DOCUMENT = record(
    {"type": word("document"), "source": _SOURCE}, {"title": MAYBE_TEXT, "context": MAYBE_TEXT}
)
_REFERENCE = record({"type": word("tool_reference"), "tool_name": TEXT})
_READABLE = (_TEXT_BLOCK, _DOCUMENT, _SEARCH_RESULT, _REFERENCE)
_RESULT = record(
    {"type": word("tool_result"), "tool_use_id": TEXT},
    {"content": either(TEXT, listed(either(*_READABLE)), NULL), "is_error": MAYBE_BOOLEAN},
)
_USE = record({"type": word("tool_use"), "id": TEXT, "name": TEXT, "input": OBJECT})
_THOUGHT = record({"type": word("thinking"), "thinking": TEXT}, {"signature": MAYBE_TEXT})
_HIDDEN = record({"type": word("redacted_thinking")})
SYSTEM = either(TEXT, listed(_TEXT_BLOCK), NULL)
MESSAGES = listed(
    either(
        record({"role": word("user"), "content": either(TEXT, listed(either(*_READABLE, _RESULT)))}),
        record(
            {
                "role": word("assistant"),
                "content": either(TEXT, listed(either(_TEXT_BLOCK, _REFERENCE, _USE, _THOUGHT, _HIDDEN))),
            }
        ),
        record({"role": word("system"), "content": either(TEXT, listed(_TEXT_BLOCK))}),
    ),
    minItems=1,
)
MESSAGES_TOOLS = either(
    listed(
        either(
            record(
                {"name": TEXT, "input_schema": OBJECT},
                {
                    "type": either(word("custom"), NULL),
                    "description": MAYBE_TEXT,
                    "strict": MAYBE_BOOLEAN,
                },
            ),
            record({"type": {"type": "string", "not": {"const": "custom"}}}),  # left out
        )
    ),
    NULL,
)
_SINGLE: Schema = {"disable_parallel_tool_use": MAYBE_BOOLEAN}
MESSAGES_TOOL_CHOICE = either(
    record({"type": word("auto", "any", "none")}, _SINGLE),
    record({"type": word("tool"), "name": TEXT}, _SINGLE),
    NULL,
)

# ------------------------------------------------------------------ Responses
_ITEM_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete", None]}
_KEPT: Schema = {"id": MAYBE_TEXT, "status": _ITEM_STATUS}
_PART = either(
    record({"type": word("input_text", "output_text", "text"), "text": TEXT}),
    record({"type": word("refusal"), "refusal": TEXT}),
)
_PARTS = either(TEXT, listed(_PART))
_CALLED: Schema = {**_KEPT, "namespace": MAYBE_TEXT}
_THOUGHTS = either(listed(record({"text": TEXT})), NULL)
INPUT = either(
    TEXT,
    listed(
        either(
            record(
                {"role": word("user", "assistant", "system", "developer"), "content": _PARTS},
                {**_KEPT, "type": either(word("message"), NULL)},
            ),
            record(
                {"type": word("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT}, _CALLED
            ),
            record({"type": word("custom_tool_call"), "call_id": TEXT, "name": TEXT, "input": TEXT}, _CALLED),
            record(
                {
                    "type": word("function_call_output", "custom_tool_call_output"),
                    "call_id": TEXT,
                    "output": _PARTS,
                },
                _KEPT,
            ),
            record(
                {"type": word("reasoning")},
                {**_KEPT, "summary": _THOUGHTS, "content": _THOUGHTS, "encrypted_content": MAYBE_TEXT},
            ),
            record({"type": word("compaction"), "encrypted_content": TEXT}, _KEPT),
            record({"type": word("item_reference"), "id": TEXT}),
        ),
        minItems=1,
    ),
)
_FLAT_FUNCTION = record(
    {"type": word("function"), "name": TEXT},
    {"description": MAYBE_TEXT, "parameters": {"type": ["object", "null"]}, "strict": MAYBE_BOOLEAN},
)
_CUSTOM = record(
    {"type": word("custom"), "name": TEXT},
    {
        "description": MAYBE_TEXT,
        "format": either(
            record({"type": word("text")}),
            record({"type": word("grammar"), "syntax": word("lark", "regex"), "definition": SOME_TEXT}),
            NULL,
        ),
    },
)
RESPONSES_TOOLS = either(
    listed(
        either(
            _FLAT_FUNCTION,
            _CUSTOM,
            record({"type": word("namespace"), "name": TEXT, "tools": listed(_FLAT_FUNCTION)}),
        )
    ),
    NULL,
)
_CHOSEN = record({"type": word("function", "custom"), "name": TEXT}, {"namespace": MAYBE_TEXT})
RESPONSES_TOOL_CHOICE = either(
    word("none", "auto", "required"),
    _CHOSEN,
    record({"type": word("allowed_tools"), "mode": word("auto", "required"), "tools": listed(_CHOSEN)}),
    NULL,
)
TEXT_FORMAT: Schema = {
    "type": ["object", "null"],
    "properties": {
        "format": FLAT_FORMAT,
        "verbosity": {"type": ["string", "null"], "enum": ["low", "medium", "high", None]},
    },
}
METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}

# ------------------------------------------------------------------ Ollama
_OLLAMA_MESSAGE = record(
    {"role": word("system", "user", "assistant", "tool")},
    {
        "content": either(TEXT, NULL),
        "images": {"type": ["array", "null"], "maxItems": 0},
        "thinking": MAYBE_TEXT,
        "tool_name": MAYBE_TEXT,
        **_SPOKEN,
    },
)
OLLAMA_MESSAGES = either(listed(_OLLAMA_MESSAGE), NULL)
OLLAMA_FORMAT = either(word("", "json"), OBJECT, NULL)
THINK: Schema = {"enum": [True, False, "low", "medium", "high", None]}

# ------------------------------------------------------------------ embeddings
TEXTS = listed(SOME_TEXT, minItems=1)
EMBEDDED = either(SOME_TEXT, TEXTS, TOKENS, listed(TOKENS, minItems=1))
DOCUMENTS = listed(either(SOME_TEXT, record({"text": SOME_TEXT})), minItems=1)
