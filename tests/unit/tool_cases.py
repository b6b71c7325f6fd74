"""What models of each family write when they call tools, and what it means. Knows no parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "limit": {"type": "number"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/Where"},
        "unit": {"enum": ["C", "F"]},
        "any": {},
    },
    "$defs": {"Where": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
WRITE = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool("get_weather", WEATHER), tool("write_file", WRITE), tool("now", None), tool("ns.search-v2", {})]


@dataclass(frozen=True)
class Case:
    """`calls`: (name, arguments). `oracle`: mlx-lm's parser of that name reads the same between its tags."""

    form: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str = ""
    reasoning: str = ""
    oracle: str = ""


def case(form: str, text: str, *calls: tuple[str, dict[str, Any]], **more: str) -> Case:
    return Case(form, text, calls, **more)


CODE = 'def f(x):\n    """doc"""\n\treturn {"a": x < 1 and x > 0, \'b\': "\\n"}  # é 😀\n'
PARIS = ("get_weather", {"city": "Paris", "days": 3})
ALL = (
    "get_weather",
    {
        "city": "São Paulo",
        "days": 2,
        "metric": True,
        "limit": 1.5,
        "note": None,
        "tags": ["a", "b c"],
        "where": {"lat": -3.5, "deep": [{"x": None}]},
        "unit": "C",
    },
)
JSON_ALL = (
    '{"city": "São Paulo", "days": 2, "metric": true, "limit": 1.5, "note": null, "tags": ["a", "b c"], '
    '"where": {"lat": -3.5, "deep": [{"x": null}]}, "unit": "C"}'
)
NOW: tuple[str, dict[str, Any]] = ("now", {})
WRITTEN = ("write_file", {"path": "/a b.py", "content": CODE})


def _json(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)


WRITE_JSON = f'{{"path": "/a b.py", "content": {_json(CODE)}}}'

_HERMES = [
    ('{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', PARIS),
    (f'{{"name": "get_weather", "arguments": {JSON_ALL}}}', ALL),
    (f'{{"name": "write_file", "arguments": {WRITE_JSON}}}', WRITTEN),
    (f'{{"arguments": {WRITE_JSON}, "name": "write_file"}}', WRITTEN),
    ('{"name": "now", "arguments": {}}', NOW),
]
_QWEN_ALL = (
    "<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "<parameter=metric>\ntrue\n</parameter>\n"
    "<parameter=limit>\n1.5\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
    '<parameter=tags>\n["a", "b c"]\n</parameter>\n'
    '<parameter=where>\n{"lat": -3.5, "deep": [{"x": null}]}\n</parameter>\n'
    "<parameter=unit>\nC\n</parameter>\n</function>"
)
_QWEN_WRITE = (
    f"<function=write_file>\n<parameter=path>\n/a b.py\n</parameter>\n"
    f"<parameter=content>\n{CODE}\n</parameter>\n</function>"
)
_PAIRS_ALL = (
    ("city", "São Paulo"),
    ("days", "2"),
    ("metric", "true"),
    ("limit", "1.5"),
    ("note", "null"),
    ("tags", '["a", "b c"]'),
    ("where", '{"lat": -3.5, "deep": [{"x": null}]}'),
    ("unit", "C"),
)


def _pairs(name: str, pairs: tuple[tuple[str, str], ...], prefix: str = "") -> str:
    body = "".join(
        f"<{prefix}arg_key>{key}</{prefix}arg_key>\n<{prefix}arg_value>{value}</{prefix}arg_value>\n"
        for key, value in pairs
    )
    return f"<{prefix}tool_call>{name}\n{body}</{prefix}tool_call>"


def _elements(name: str, pairs: tuple[tuple[str, str], ...], call: str, field: str) -> str:
    body = "".join(f'<{field} name="{key}">{value}</{field}>\n' for key, value in pairs)
    return f'<{call} name="{name}">\n{body}</{call}>'


STRIPPED = ("write_file", {"path": "/a b.py", "content": CODE.strip()})
_WRITE_PAIRS = (("path", "/a b.py"), ("content", CODE))
_XTML = (
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="write_file" index="2"<|sep|><|open|>json type="object"<|sep|>'
    f"{WRITE_JSON}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
_B, _U = "\uff5c", "\u2581"


def _deepseek(name: str) -> str:
    return f"<{_B}tool{_U}{name.replace(' ', _U)}{_B}>"


_DSML = f"{_B}DSML{_B}"

CASES = (
    *(
        case("hermes", f"<tool_call>\n{body}\n</tool_call>", call, oracle="json_tools")
        for body, call in _HERMES
    ),
    case(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        PARIS,
        NOW,
        content="Let me see.",
        oracle="json_tools",
    ),
    case(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n</tool_call>',
        PARIS,
    ),
    case(
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
        NOW,
    ),
    case(
        "hermes",
        "<tool_call>[{'name': 'get_weather', 'arguments': {'city': 'Paris', 'days': 3,}}, {'name': 'now'}]</tool_call>"
        " That is it.".replace("'", '"'),
        PARIS,
        NOW,
        content="That is it.",
    ),
    case("llama3", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', PARIS),
    case(
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "write_file", "parameters": {WRITE_JSON}}}',
        WRITTEN,
    ),
    case("llama3", '\n{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', NOW, NOW),
    case(
        "granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]', PARIS
    ),
    case(
        "command",
        '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "Paris", "days": 3}}\n]<|END_ACTION|>',
        PARIS,
    ),
    case("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', NOW),
    case("qwen3_coder", f"<tool_call>\n{_QWEN_ALL}\n</tool_call>", ALL),
    case(
        "qwen3_coder",
        f"Now:\n<tool_call>\n{_QWEN_WRITE}\n</tool_call>",
        WRITTEN,
        content="Now:",
        oracle="qwen3_coder",
    ),
    case(
        "qwen3_coder",
        f"<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n{_QWEN_WRITE}\n</tool_call>",
        NOW,
        WRITTEN,
        oracle="qwen3_coder",
    ),
    case(
        "qwen3_coder",
        "<function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function>\n</tool_call>",
        PARIS,
    ),
    case("seed", f"<seed:tool_call>\n{_QWEN_WRITE}\n</seed:tool_call>", WRITTEN),
    *(case(name, _pairs("get_weather", _PAIRS_ALL), ALL, oracle=name) for name in ("glm47", "laguna")),
    case(
        "glm47",
        f"Hm.\n{_pairs('write_file', _WRITE_PAIRS)}\n{_pairs('now', ())}",
        STRIPPED,
        NOW,
        content="Hm.",
    ),
    case(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        PARIS,
        oracle="glm47",
    ),
    case("longcat", _pairs("get_weather", _PAIRS_ALL, "longcat_"), ALL, oracle="longcat"),
    case(
        "longcat",
        '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</longcat_tool_call>',
        PARIS,
        oracle="longcat",
    ),
    case(
        "minimax_m2",
        f"Yes.\n<minimax:tool_call>\n{_elements('get_weather', _PAIRS_ALL, 'invoke', 'parameter')}\n"
        f"{_elements('write_file', _WRITE_PAIRS, 'invoke', 'parameter')}\n</minimax:tool_call>",
        ALL,
        STRIPPED,
        content="Yes.",
    ),
    case(
        "minimax_m2",
        f"<minimax:tool_call>\n{_elements('get_weather', _PAIRS_ALL[:6], 'invoke', 'parameter')}\n"
        f"{_elements('write_file', _WRITE_PAIRS, 'invoke', 'parameter')}\n</minimax:tool_call>",
        ("get_weather", dict(list(ALL[1].items())[:6])),
        STRIPPED,
        oracle="minimax_m2",
    ),
    case(
        "muse_spark",
        "<atem:function_calls>\n"
        f"{_elements('get_weather', (('city', 'Paris'), ('days', '3')), 'atem:invoke', 'atem:parameter')}\n"
        "</atem:function_calls>",
        PARIS,
        oracle="muse_spark",
    ),
    case(
        "minicpm5",
        '<function name="get_weather"><param name="city">Paris</param><param name="days">3</param></function>'
        '<function name="write_file"><param name="path">/a b.py</param>'
        f'<param name="content"><![CDATA[{CODE}]]></param>'
        "</function>",
        PARIS,
        WRITTEN,
        oracle="minicpm5",
    ),
    case(
        "minicpm5",
        '<function name="get_weather"><param name="city">A &amp; B &lt;C&gt;</param></function>',
        ("get_weather", {"city": "A & B <C>"}),
    ),
    case(
        "kimi_k2",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f'{JSON_ALL}<|tool_call_end|><|tool_call_begin|>functions.ns.search-v2:1<|tool_call_argument_begin|>{{"q": 1}}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        ALL,
        ("ns.search-v2", {"q": 1}),
        content="Sure.",
        oracle="kimi_k2",
    ),
    case("kimi_k3", _XTML, PARIS, WRITTEN, oracle="kimi_k3"),
    case(
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Sure.<|close|>response<|sep|>"
        f"{_XTML}<|close|>message<|sep|>",
        PARIS,
        WRITTEN,
        content="Sure.",
        reasoning="Hm.",
    ),
    case(
        "deepseek",
        f"Ok\n{_deepseek('calls begin')}{_deepseek('call begin')}function{_deepseek('sep')}get_weather\n```json\n"
        f"{JSON_ALL}\n```{_deepseek('call end')}\n"
        f"{_deepseek('call begin')}function{_deepseek('sep')}now\n```json\n{{}}\n```"
        f"{_deepseek('call end')}{_deepseek('calls end')}",
        ALL,
        NOW,
        content="Ok",
    ),
    case(
        "deepseek",
        f"{_deepseek('calls begin')}{_deepseek('call begin')}write_file{_deepseek('sep')}{WRITE_JSON}"
        f"{_deepseek('call end')}{_deepseek('call begin')}now{_deepseek('sep')}{{}}{_deepseek('call end')}"
        f"{_deepseek('calls end')}",
        WRITTEN,
        NOW,
    ),
    case(
        "deepseek_v32",
        f'<{_DSML}function_calls>\n<{_DSML}invoke name="get_weather">\n'
        f'<{_DSML}parameter name="city" string="true">Paris'
        f'</{_DSML}parameter>\n<{_DSML}parameter name="days" string="false">3</{_DSML}parameter>\n</{_DSML}invoke>\n'
        f"</{_DSML}function_calls>",
        PARIS,
    ),
    case(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>São Paulo<|"|>,days:2,metric:true,limit:1.5,note:null,'
        'tags:[<|"|>a<|"|>,<|"|>b c<|"|>],where:{lat:-3.5,deep:[{x:null}]},unit:<|"|>C<|"|>}<tool_call|>'
        f'<|tool_call>call:write_file{{path:<|"|>/a b.py<|"|>,content:<|"|>{CODE}<|"|>}}<tool_call|>',
        ALL,
        WRITTEN,
        oracle="gemma4",
    ),
    case("gemma4", "Well. <|tool_call>call:now{}<tool_call|>", NOW, content="Well.", oracle="gemma4"),
    case(
        "function_gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
        "<start_function_call>call:get_weather{city:Paris,days:3}<end_function_call>",
        PARIS,
        PARIS,
        oracle="function_gemma",
    ),
    case(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "now", '
        '"arguments": {}, "id": "abcdefghi"}]',
        PARIS,
        NOW,
        oracle="mistral",
    ),
    case(
        "mistral",
        f"Ok.[TOOL_CALLS]write_file[ARGS]{WRITE_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        WRITTEN,
        NOW,
        content="Ok.",
    ),
    case("mistral", f"[TOOL_CALLS]get_weather[ARGS]{JSON_ALL}now[ARGS]{{}}", ALL, NOW, oracle="mistral"),
    case("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris", "days": 3}', PARIS),
    case(
        "pythonic",
        '<|tool_call_start|>[get_weather(city="São Paulo", days=2, metric=True, '
        "limit=1.5, note=None, tags=['a', 'b c'], "
        'where={"lat": -3.5, "deep": [{"x": null}]}, unit="C"), now(), ns.search(a=(1, 2))]<|tool_call_end|>',
        ALL,
        NOW,
        content=", ns.search(a=(1, 2))]<|tool_call_end|>",
    ),
    case(
        "pythonic",
        f"Ok <|tool_call_start|>[write_file(path='/a b.py', content={CODE!r}), now()]<|tool_call_end|>",
        WRITTEN,
        NOW,
        content="Ok",
        oracle="pythonic",
    ),
    case(
        "pythonic",
        "<|tool_call_start|>\n```python\nget_weather(city='Paris', days=3)\nnow()\n```\n<|tool_call_end|>",
        PARIS,
        NOW,
    ),
    case(
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look it up.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        PARIS,
        content="I look it up.",
        reasoning="Need the weather.",
    ),
    case(
        "harmony",
        f" to=functions.write_file<|channel|>commentary json<|message|>{WRITE_JSON}",
        WRITTEN,
    ),
    case(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant"
        "<|channel|>final<|message|>4, of course.\n<|return|>",
        content="4, of course.\n",
        reasoning="Easy.",
    ),
)
