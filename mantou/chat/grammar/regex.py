"""What a regex would cost as an automaton, seen before it is compiled. Knows no grammar and no tokens."""

from __future__ import annotations

import re

from mantou.errors import BadRequest

# Copies of the innermost part that nested counts ask for: (a{1000}){1000} has a million, and takes seconds a token.
MAX_COPIES = 20_000
_COUNT = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def check_regex(pattern: str, param: str) -> None:
    """Raises BadRequest for nested counts that multiply beyond MAX_COPIES."""
    most = [1]  # for each open group: the most copies of a part in it
    place = 0
    while place < len(pattern):
        char = pattern[place]
        copies = 1
        if char == "(":
            most.append(1)
            place += 1
            continue
        if char == "\\":
            place += 2
        elif char == "[" and (found := _CLASS.match(pattern, place)):
            place = found.end()
        else:
            if char == ")" and len(most) > 1:
                copies = most.pop()
            place += 1
        if count := _COUNT.match(pattern, place):
            copies *= max(int(count[1]), int(count[2] or 0), 1)
            place = count.end()
        if copies > MAX_COPIES:
            raise BadRequest(
                f"{param} has a regex that repeats a part up to {copies} times; keep it below {MAX_COPIES}.",
                param=param,
            )
        most[-1] = max(most[-1], copies)


def unanchored(regex: str) -> str:
    """For a place that matches the whole anyway: anchors at the ends say the same."""
    body = regex.removeprefix("^")
    return body[:-1] if _ends_anchored(body) else body


def anchored(pattern: str) -> str:
    """A schema's pattern, which matches anywhere in a text, as a regex of the whole text."""
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    after = "" if _ends_anchored(pattern) else r"(.|\n)*"
    return f"{before}({unanchored(pattern)}){after}"


def _ends_anchored(regex: str) -> bool:
    slashes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex.endswith("$") and slashes % 2 == 0
