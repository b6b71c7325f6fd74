"""Renders the tree of the package: one line a module, the first sentence of its docstring. Knows no meaning.

`python scripts/tree.py` prints it; `--check` fails if README.md does not hold exactly this.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def first_sentence(path: Path) -> str:
    """The first sentence of the module's docstring, without its full stop. Raises SystemExit if there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring: say in its first line what it is.")
    return docstring.splitlines()[0].split(". ")[0].rstrip(".")


def entries(folder: Path, depth: int) -> Iterator[tuple[str, str]]:
    """(indented name, what it is) of everything in a package, folders after files."""
    indent = "  " * depth
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield indent + path.name, first_sentence(path)
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield f"{indent}{package.name}/", first_sentence(package / "__init__.py")
        yield from entries(package, depth + 1)


def tree() -> str:
    package = ROOT / "mantou"
    found = [("mantou/", first_sentence(package / "__init__.py")), *entries(package, 1)]
    width = max(len(name) for name, _ in found) + 2
    return "\n".join(["```", *(f"{name:<{width}}{text}".rstrip() for name, text in found), "```"])


if __name__ == "__main__":
    if "--check" not in sys.argv:
        print(tree())
    elif tree() not in (ROOT / "README.md").read_text():
        sys.exit("The tree in README.md is stale: run `make docs`.")
