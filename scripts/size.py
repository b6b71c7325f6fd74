"""Prints the size of the code and fails where a module is over its bound. Knows lines, not meaning.

Bounds (design rule 20): a module over 400 lines is listed, over 600 fails; the 90th percentile of function lengths
is at most 30 lines.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED_LINES = 400
MOST_LINES = 600
FUNCTION_P90_LINES = 30


def function_lengths(source: str) -> list[int]:
    """Lines of every function and method, decorators and docstring included."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes]


def percentile(values: list[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0


def main() -> int:
    modules = {path: path.read_text() for path in sorted((ROOT / "mantou").rglob("*.py"))}
    lines = {path: len(text.splitlines()) for path, text in modules.items()}
    functions = [length for text in modules.values() for length in function_lengths(text)]
    p90 = percentile(functions, 0.9)
    print(
        f"size: {len(modules)} modules, {sum(lines.values())} lines, longest {max(lines.values())}; "
        f"{len(functions)} functions, p90 {p90}, longest {max(functions)} lines"
    )
    for path, count in sorted(lines.items(), key=lambda item: -item[1]):
        if count > LISTED_LINES:
            print(f"  {count} lines: {path.relative_to(ROOT)}")
    too_long = [path for path, count in lines.items() if count > MOST_LINES]
    if too_long:
        print(f"{len(too_long)} module(s) over {MOST_LINES} lines: split by idea.")
    if p90 > FUNCTION_P90_LINES:
        print(f"One function in ten is over {p90 - 1} lines; the bound is {FUNCTION_P90_LINES}.")
    return 1 if too_long or p90 > FUNCTION_P90_LINES else 0


if __name__ == "__main__":
    sys.exit(main())
