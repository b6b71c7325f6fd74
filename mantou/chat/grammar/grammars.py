"""What an answer must be, compiled for one tokenizer: schemas, regexes, grammars, choices and enforced tool calls.

`write` turns a request's wishes into a grammar and compiles it, on the caller's thread; `make` hands the engine a
constraint over what was compiled. Reasoning comes first and is free, up to its budget; the end of sequence is allowed
exactly where the grammar is satisfied. Knows no HTTP, no engine and no arrays beyond a mask.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mantou.chat.grammar.calls import MAX_CALLS, Tool, calls, has_grammar, trigger
from mantou.chat.grammar.lark import ANYTHING, Lark
from mantou.chat.grammar.regex import check_regex, unanchored
from mantou.chat.grammar.schema import bounded
from mantou.chat.reasoning import ReasoningFormat
from mantou.chat.tokenizer import Tokenizer
from mantou.chat.tools import ToolUse
from mantou.data import Grammar, Request
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from mantou.chat.grammar.constraint import GrammarConstraint
    from mantou.protocols import Constraint

MAX_SOURCE = 512 * 1024  # characters of one grammar; larger ones come from no real client
MAX_MESSAGE = 300
_NUM_CACHED = 128
# Units of llguidance. Its own limits let one regex take ten seconds of the model's thread.
_START_FUEL, _STEP_FUEL, _MAX_STATES, _MAX_SYMBOLS = 200_000, 200_000, 50_000, 200_000
_GAP = r"\n{0,2}"  # between reasoning and answer


@dataclass(frozen=True, slots=True)
class _Frame:
    """How a format that frames whole answers writes its parts. `end` may close the whole."""

    reasoning: tuple[str, str]
    text: tuple[str, str]
    end: str = ""
    most_reasoning: int = 1  # blocks
    text_and_calls: bool = False  # in one answer


_FRAMES: Mapping[str, _Frame] = {
    "harmony": _Frame(
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ("<|channel|>final<|message|>", ""),
        most_reasoning=2,
    ),
    "kimi_k3": _Frame(
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        end="<|close|>message<|sep|>",
        text_and_calls=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The answer around the grammar.

    reasoning: how the model marks its reasoning; reasoning_open: the prompt ends inside it; may_reason: the answer may
    open a block itself. tools, choice, tool_name: what may or must be called; strict: the tools whose arguments must
    follow their schema even where the call is the model's choice.
    """

    reasoning: ReasoningFormat | None = None
    reasoning_open: bool = False
    may_reason: bool = True
    tools: ToolUse | None = None
    choice: str = "auto"
    tool_name: str | None = None
    strict: frozenset[str] = frozenset()


class Grammars:
    """The compiler of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None
        self._specials: Mapping[str, int] = {}

    def write(self, wish: Grammar | None, setting: Setting) -> str:
        """The grammar of a whole answer, compiled and ready for `make`; "" if the answer is free.

        Takes milliseconds, or a second for what is at the limits. Raises BadRequest for a keyword that is not
        supported, what does not parse, what nothing can match, and what is too large.
        """
        use = setting.tools
        strict = setting.strict and use is not None and has_grammar(use.form)
        if wish is None and setting.choice == "auto" and not strict:
            return ""
        if wish is not None and len(wish.source) > MAX_SOURCE:
            raise BadRequest(
                f"{wish.param} has {len(wish.source)} characters, "
                f"but a grammar may have {MAX_SOURCE}; make it smaller.",
                param=wish.param,
            )
        self._load()
        lark = Lark(self._specials)
        text = lark.text(self._answer(lark, wish, setting))
        self._get(text, wish.param if wish is not None else "tools")
        return text

    def make(self, request: Request) -> Constraint | None:
        """The Constraints seam."""
        found = self._grammar(request.grammar) if request.grammar else None
        if request.reasoning_budget is None:
            return found
        from mantou.chat.grammar.budget import BudgetConstraint

        return BudgetConstraint(self._tokenizer, request.reasoning_budget, found)

    def _grammar(self, text: str) -> GrammarConstraint:
        from mantou.chat.grammar.constraint import GrammarConstraint

        matcher = self._get(text, "response_format").deep_copy()
        return GrammarConstraint(matcher, sorted(self._tokenizer.eos))

    # ------------------------------------------------------------------ the answer
    def _answer(self, lark: Lark, wish: Grammar | None, setting: Setting) -> str:
        use = setting.tools
        if use is not None and use.form.reasoning is not None:
            return self._framed(lark, wish, setting, _FRAMES[use.form.name])
        content = _content(lark, wish) if wish is not None else None
        if setting.choice != "auto":
            body = self._calls(lark, setting)
        elif content is not None:
            called = self._calls(lark, setting) if use is not None and use.tools else ""
            body = lark.rule("body", " | ".join(part for part in (called, content) if part))
        else:
            body = self._free(lark, setting)
        return f"{_reasoning(lark, setting)} {body}".strip()

    def _framed(self, lark: Lark, wish: Grammar | None, setting: Setting, frame: _Frame) -> str:
        use = setting.tools
        assert use is not None
        called = self._calls(lark, setting) if use.tools or setting.choice != "auto" else ""
        before, after = frame.text
        if setting.choice != "auto":
            body = called
        elif wish is not None:
            content = f"{lark.spelled(before)} {_content(lark, wish)} {lark.spelled(after)}"
            body = lark.rule("body", f"{called} | {content}" if called else content)
        else:
            rest = lark.until(after) if after else lark.rule("rest", ANYTHING)
            more = f"({called})?" if called and frame.text_and_calls else ""
            content = f"{lark.spelled(before)} {rest} {more}"
            body = lark.rule("body", f"{called} | {content}" if called else content)
        end = f"({lark.spelled(frame.end)})?" if frame.end else ""
        return f"{_framed_reasoning(lark, setting, frame)} {body} {end}".strip()

    def _calls(self, lark: Lark, setting: Setting, opened: str = "") -> str:
        """`opened`: what has begun the first call already."""
        use = setting.tools
        if use is None or not use.tools:
            raise BadRequest(
                "This server reads no tool calls from this model, so none can be enforced; set tool_choice to auto.",
                param="tool_choice",
            )
        names = [setting.tool_name] if setting.tool_name is not None else list(use.tools)
        tools = [Tool(name, use.tools[name], name in setting.strict, f"tools ({name})") for name in names]
        tools = [self._compilable(tool) for tool in tools]
        many = use.parallel and setting.tool_name is None
        return calls(lark, use.form, tools, MAX_CALLS if many else 1, opened)

    def _compilable(self, tool: Tool) -> Tool:
        """A tool that is not strict is not refused for a schema that cannot be enforced: any object is its argument."""
        if tool.strict:
            return tool
        try:
            lark = Lark({})
            self._get(lark.text(lark.json(tool.json())), tool.param)
        except BadRequest:
            return Tool(tool.name, {"type": "object"}, False, tool.param)
        return tool

    def _free(self, lark: Lark, setting: Setting) -> str:
        """Text, and calls in it; inside a call, the grammar holds."""
        assert setting.tools is not None
        opener = trigger(setting.tools.form)
        if not opener:
            other = "".join(map(re.escape, setting.tools.form.starts))
            rest = lark.terminal(f"([^{other}](.|\\n)*)?" if other else "(.|\\n)*")
            return lark.rule("body", f"{self._calls(lark, setting)} | {rest}")
        called = self._calls(lark, setting, opener)
        return f"({lark.until(opener)} {called})* {lark.rule('rest', ANYTHING)}"

    # ------------------------------------------------------------------ compiling
    def _get(self, text: str, param: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found
        made = self._compile(text, param)
        with self._lock:
            self._compiled[text] = made
            while len(self._compiled) > _NUM_CACHED:
                self._compiled.popitem(last=False)
        return made

    def _compile(self, text: str, param: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=_START_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_STATES,
            max_grammar_size=_MAX_SYMBOLS,
            verbose_errors=False,
        )
        made = LLMatcher(self._load(), text, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()  # a fault may show only here
        if made.is_error():
            raise BadRequest(f"{param} cannot be used: {_reason(made.get_error())}", param=param)
        certain = made.compute_ff_tokens()
        if certain and not made.deep_copy().consume_token(certain[0]):
            raise BadRequest(f"{param} requires text without end; add a way out of it.", param=param)
        if made.is_stopped() and not made.is_accepting():
            raise BadRequest(f"{param} cannot be used: no text matches it.", param=param)
        return made

    def _load(self) -> LLTokenizer:
        """The tokenizer as llguidance sees it, made at first use: a tenth of a second for 50k tokens."""
        with self._building:
            if self._vocabulary is None:
                from mantou.chat.grammar.vocabulary import vocabulary

                self._specials, self._vocabulary = vocabulary(self._tokenizer)
            return self._vocabulary


def _content(lark: Lark, wish: Grammar) -> str:
    match wish.kind:
        case "json_object":
            return lark.json(bounded({"type": "object"}, wish.param))
        case "json_schema":
            return lark.json(bounded(json.loads(wish.source), wish.param))
        case "regex":
            from llguidance import regex_to_lark

            check_regex(wish.source, wish.param)
            return lark.terminal(regex_to_lark(unanchored(wish.source), ""))
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(wish.source)]
            return lark.rule("choice", " | ".join(texts))
        case "lark":
            check_regex(wish.source, wish.param)  # the same notation counts rules and characters
            return lark.nested(_as_lark(wish))


def _as_lark(wish: Grammar) -> str:
    """Lark as it is; GBNF, which has ::= in it, translated."""
    if "::=" not in wish.source:
        return wish.source
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(wish.source)
    except (GbnfToLarkError, RecursionError) as error:
        raise BadRequest(
            f"{wish.param} is not GBNF that can be read: {_reason(str(error))}", param=wish.param
        ) from None


def _reasoning(lark: Lark, setting: Setting) -> str:
    """The rest of a block that the prompt opened, or a block that the answer may open."""
    form = setting.reasoning
    if form is None:
        return ""
    rest = lark.rule("think", f"{lark.until(form.close)} {lark.terminal(_GAP)}")
    if setting.reasoning_open:
        return rest
    return f"({lark.spelled(form.open)} {rest})?" if setting.may_reason else ""


def _framed_reasoning(lark: Lark, setting: Setting, frame: _Frame) -> str:
    opening, closing = frame.reasoning
    rest = lark.until(closing)
    if setting.reasoning_open:
        return rest
    return f"({lark.spelled(opening)} {rest}){{0,{frame.most_reasoning}}}"


def _reason(error: str) -> str:
    """The first line of a compiler's message, without its own places."""
    line = error.strip().partition("\n")[0]
    line = re.sub(r"^(?:at )?\d+\(\d+\): ", "", line).removeprefix("failed to compile JSON schema: ")
    return line[:MAX_MESSAGE].rstrip(".") + "."
