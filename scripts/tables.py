"""The tables of docs/, each read from the code or from a test's result. Knows no files of docs/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *(line(row) for row in rows)])


# ------------------------------------------------------------------ docs/flags.md
def flags() -> str:
    """Every verb of the command line with its arguments and options."""
    import typer.main

    from mantou.cli import app

    group: Any = typer.main.get_command(app)
    return "\n\n".join(
        _verb(name, command) for name, command in sorted(group.commands.items()) if not command.hidden
    )


def _verb(name: str, command: Any) -> str:
    rows = [
        _parameter(one) for one in command.params if one.name != "help" and not getattr(one, "hidden", False)
    ]
    text = f"## mantou {name}\n\n{(command.help or '').strip()}"
    return f"{text}\n\n{markdown(('flag', 'default', 'what it does'), rows)}" if rows else text


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        names = parameter.name.upper()
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = "" if default is None or callable(default) or default is False else f"`{default}`"
    return f"`{names}`", shown, getattr(parameter, "help", None) or ""


# ------------------------------------------------------------------ docs/api.md
def routes() -> str:
    """Every HTTP route, then the fields of each body, from the server's own OpenAPI document."""
    paths = _openapi()["paths"]
    rows = [
        (method.upper(), f"`{path}`", operation["summary"])
        for path, operations in paths.items()
        for method, operation in operations.items()
    ]
    posts = [(path, operations["post"]) for path, operations in paths.items() if "post" in operations]
    posts = [(path, operation) for path, operation in posts if "requestBody" in operation]
    bodies = [one for one in posts if "properties" in _schema(one[1])]
    return "\n\n".join(
        [markdown(("method", "path", "what it answers"), rows), *(_body(*body) for body in bodies)]
    )


def _openapi() -> dict[str, Any]:
    from mantou import __version__
    from mantou.api.app import DIALECTS
    from mantou.api.openapi import document

    return dict(document(__version__, DIALECTS))


def _schema(operation: Any) -> Any:
    return operation["requestBody"]["content"]["application/json"]["schema"]


def _body(path: str, operation: Any) -> str:
    schema = _schema(operation)
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            _type(field) + (" (required)" if name in required else ""),
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
    ]
    return f"## Fields of `{path}`\n\n{markdown(('field', 'type', 'what it does'), rows)}"


def _type(field: Any) -> str:
    """`number, 0 to 2`: the JSON type without null, and its bounds."""
    kinds = dict.fromkeys(kind for kind in _types(field) if kind != "null")
    shown = " or ".join(kinds) or "any"
    low, high = (_bound(field.get(side)) for side in ("minimum", "maximum"))
    if low and high:
        return f"{shown}, {low} to {high}"
    return f"{shown}, at least {low}" if low else shown


def _types(field: dict[str, Any]) -> list[str]:
    """The JSON types that a schema allows, in the order in which it names them."""
    if "anyOf" in field:
        return [kind for option in field["anyOf"] for kind in _types(option)]
    if "type" in field:
        return [field["type"]] if isinstance(field["type"], str) else field["type"]
    names = {bool: "boolean", str: "string", int: "integer", type(None): "null"}
    return [names[type(value)] for value in field.get("enum", [field["const"]] if "const" in field else [])]


def _bound(value: float | None) -> str:
    """A bound as text; empty where there is none worth saying."""
    return "" if value is None or abs(value) >= 1e9 else f"{value:g}"


# ------------------------------------------------------------------ docs/models.md
def families() -> str:
    """Every model family that the matrix knows: supported or refused, and why."""
    from mantou.models.families import table

    found = sorted(table().items())
    supported = [
        (name, ", ".join(row.layouts), _batching(row), _codecs(row), "yes", _hits(row))
        for name, row in found
        if row.supported
    ]
    refused = [(name, row.reason) for name, row in found if not row.supported]
    parts = [f"{len(supported)} families are served:"]
    columns = ("family", "caches", "rows of one step", "KV codecs", "speculation", "prompt cache")
    parts.append(markdown(columns, supported))
    if refused:
        parts += [f"{len(refused)} families are refused at load:", markdown(("family", "reason"), refused)]
    return "\n\n".join(parts)


def _codecs(row: Any) -> str:
    """What `--kv-quant` can do here; head dimensions are the checkpoint's, and checked when it is loaded."""
    if "full" in row.layouts:
        return "all"
    return "8, 4, config" if set(row.layouts) & {"window", "chunked"} else "none: no keys and values"


def _hits(row: Any) -> str:
    return "up to a kept state" if "recurrent" in row.layouts else "to the token"


def _batching(row: Any) -> str:
    if row.ragged_offsets and row.ragged_widths:
        return "any mix"
    return "same number of tokens" if row.ragged_offsets else "same length"


# ------------------------------------------------------------------ docs/performance/README.md
def performance() -> str:
    """The newest result of `make bench`, then the newest of each folder beside it (another device)."""
    folder = ROOT / "docs" / "performance"
    newest = [
        max(found) for found in ([*place.glob("*.json")] for place in (folder, *_folders(folder))) if found
    ]
    return (
        "\n\n".join(_result(path, folder) for path in newest)
        or "No result is recorded yet: run `make bench`."
    )


def _folders(place: Path) -> list[Path]:
    return sorted(one for one in place.iterdir() if one.is_dir())


def _result(path: Path, folder: Path) -> str:
    from tests.bench import cache_report, draft_servers, paged_report, report, speculation

    name, result = path.relative_to(folder).as_posix(), json.loads(path.read_text())
    tables: dict[str, Callable[[Any], str]] = {
        "cache": cache_report.table,
        "paged": paged_report.table,
        "draft_servers": draft_servers.table,
        "speculation": speculation.table,
    }
    table = next((tables[kind] for kind in tables if kind in result), report.table)
    return f"From [{name}]({name}).\n\n{table(result)}"
