"""Tiny models that read and write as families of real ones do: folder, chat template, wording of an answer.

Knows no engine and no client. The weights are random, so somebody else decides what the model says
(`scripted_server`); the vocabulary is SmolLM2's with the family's own tags, so that prompts have their usual length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import tokenizers
from mlx.utils import tree_flatten
from tokenizers import AddedToken

from mantou.models.load import build
from tests.real import starter_folder

CONTEXT = 1 << 17
OFFER = "You can call these functions:\n<tools>"  # what the tools stand behind
_QWEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_HARMONY_TAGS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
_GRAPH = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Say:
    """One answer. `calls`: (name, arguments)."""

    text: str = ""
    think: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """`write`: an answer as this family's models write it, behind the generation prompt of `template`, with its end.

    answer: matches once for every earlier answer in a prompt. tags: added tokens, special ones if `special`.
    """

    template: str
    write: Callable[[Say], str]
    answer: str
    tags: Sequence[str] = _QWEN_TAGS
    special: bool = False
    ends: Sequence[str] = ("<|im_end|>",)

    def num_answers(self, prompt: str) -> int:
        return len(re.findall(self.answer, prompt))


def _json_call(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _xml_call(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _qwen3(say: Say) -> str:
    think = f"<think>\n{say.think}\n</think>\n\n" if say.think else ""
    body = "\n".join(filter(None, (say.text, *(_json_call(*call) for call in say.calls))))
    return f"{think}{body}<|im_end|>"


def _qwen35(say: Say) -> str:
    """Its prompt has opened the block."""
    calls = "\n".join(_xml_call(*call) for call in say.calls)
    body = "\n\n".join(filter(None, (say.text, calls)))
    return f"{say.think}\n</think>\n\n{body}<|im_end|>"


def _gpt_oss(say: Say) -> str:
    """A message to a channel each. It makes one call an answer."""
    think = f"<|channel|>analysis<|message|>{say.think}<|end|><|start|>assistant" if say.think else ""
    if not say.calls:
        return f"{think}<|channel|>final<|message|>{say.text}<|return|>"
    ((name, arguments),) = say.calls
    said = f"<|channel|>commentary<|message|>{say.text}<|end|><|start|>assistant" if say.text else ""
    call = f"to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
    return f"{think}{said}<|channel|>commentary {call}"


_SYSTEM = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n\n' + OFFER }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\n\nWrite a call like this:\n' + EXAMPLE + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_TURNS = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}LATE{%- endif %}
{%- elif m.role == 'user' %}
{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
{%- elif loop.index0 > ns.last and OPENED %}{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- GAP }}{%- endif %}
CALL
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}THINK{%- endif %}
"""
_JSON_CALL = """\
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"""
_XML_CALL = """\
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}"""


_GPT_OSS = """\
{{- '<|start|>system<|message|>You are a language model.\\nReasoning: ' + (reasoning_effort or 'medium') }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}{%- endif %}
{%- if tools %}
{{- '# Tools\\n\\n' + OFFER }}
{%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{%- endfor %}{{- '\\n</tools>' }}
{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(last=-1, name='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{- raise_exception('Send content or thinking, not both.') }}{%- endif %}
{%- if m.content or (m.thinking and loop.index0 > ns.last) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}
{%- set ns.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


def _template(**parts: str) -> str:
    text = _SYSTEM + _TURNS
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


_QWEN_ANSWER = r"(?s)<\|im_start\|>assistant\n(?=.*?<\|im_end\|>)"
FAMILIES: Mapping[str, Family] = {
    # JSON in tags; reasons when it likes; system messages anywhere.
    "qwen3": Family(
        _template(
            OFFER=repr(OFFER),
            EXAMPLE=repr('<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'),
            LATE="{{- '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}",
            OPENED="false",
            GAP=repr("\n"),
            CALL=_JSON_CALL,
            THINK="{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
        ),
        _qwen3,
        _QWEN_ANSWER,
    ),
    # Functions as tags; always reasons; a system message is refused but at the beginning.
    "qwen3.5": Family(
        _template(
            OFFER=repr(OFFER),
            EXAMPLE=repr(
                "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
            ),
            LATE="{{- raise_exception('System message must be at the beginning.') }}",
            OPENED="true",
            GAP=repr("\n\n"),
            CALL=_XML_CALL,
            THINK="{{- '<think>\\n' }}",
        ),
        _qwen35,
        _QWEN_ANSWER,
    ),
    # Messages on channels; reasoning or text beside a call, not both; earlier reasoning goes once it has answered.
    "gpt-oss": Family(
        _GPT_OSS.replace("OFFER", repr(OFFER)),
        _gpt_oss,
        r"<\|call\|>|<\|channel\|>final<\|message\|>",
        _HARMONY_TAGS,
        special=True,
        ends=("<|return|>", "<|call|>"),
    ),
}


def write_folder(folder: Path, family: str) -> Path:
    """A model folder of a family."""
    folder.mkdir(parents=True)
    backend = tokenizers.Tokenizer.from_file(str(starter_folder() / "tokenizer.json"))
    made = FAMILIES[family]
    backend.add_tokens([AddedToken(tag, special=made.special, normalized=False) for tag in made.tags])
    backend.save(str(folder / "tokenizer.json"))
    ends = [backend.token_to_id(end) for end in made.ends]
    config = {**_GRAPH, "vocab_size": backend.get_vocab_size(), "eos_token_id": ends}
    settings = {"bos_token": None, "eos_token": made.ends[0], "chat_template": made.template}
    for name, content in (("config", config), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    parameters = tree_flatten(build("llama", config).parameters())
    keys = mx.random.split(mx.random.key(7), len(parameters))
    weights = {
        name: mx.random.normal(value.shape, key=key) * 0.1 if value.ndim == 2 else mx.ones(value.shape)
        for (name, value), key in zip(parameters, keys, strict=True)
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
