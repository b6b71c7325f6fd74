"""Writes the generated parts of README.md and docs/; with --check, fails if one of them is stale.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import tables  # noqa: E402  needs the path above
from tree import tree  # noqa: E402

PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "tree": ("README.md", tree),
    "flags": ("docs/flags.md", tables.flags),
    "routes": ("docs/api.md", tables.routes),
    "families": ("docs/models.md", tables.families),
    "performance": ("docs/performance/README.md", tables.performance),
}


def replace(text: str, name: str, part: str) -> str:
    """`text` with its part `name` replaced. Raises SystemExit if it has no such part."""
    pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)"
    found, count = re.subn(pattern, lambda match: f"{match[1]}{part}\n{match[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"There is no single generated part {name!r} to fill.")
    return found


def main() -> int:
    check = "--check" in sys.argv
    stale = []
    for name, (path, render) in PARTS.items():
        file = ROOT / path
        old = file.read_text()
        new = replace(old, name, render())
        if new == old:
            continue
        stale.append(path)
        if not check:
            file.write_text(new)
            print(f"wrote {path}")
    if check and stale:
        print(f"Stale generated parts in {', '.join(stale)}: run `make docs` and commit.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
