"""What a family can do, found by running its tiny model.

`python -m tests.compose.probe` writes mantou/models/families.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mantou.cache.ram import RamStore
from mantou.data import Request, Sampling
from mantou.models import families
from mantou.models.layouts import KINDS, layout_names
from mantou.models.load import make_caches
from tests.compose.families import BROKEN, FAMILIES, OWN_CACHE, RECOMPUTE, tiny
from tests.compose.harness import Case, Outcome, capabilities, model, requests, run
from tests.fakes import NoisyOracle

TABLE = Path(families.__file__).with_name("families.json")
NUM_TOKENS = 10
STAGGERED = {"r1": 1, "r2": 3, "r3": 5}


def probe(name: str) -> dict[str, Any]:
    """The family's row of families.json."""
    reason = BROKEN.get(name) or OWN_CACHE.get(name)
    if reason is None:
        unknown = sorted(set(layout_names(model(name).shapes)) - {*KINDS.values(), "keys"})
        reason = (
            f"its layers keep their cache in {', '.join(unknown)}, which has no layout yet"
            if unknown
            else None
        )
    if reason is None:
        reason = difference(name)
    if reason is not None:
        return {"supported": False, "reason": reason}
    found = capabilities(name)
    row: dict[str, Any] = {"supported": True, "layouts": sorted(layout_names(model(name).shapes))}
    row |= {} if found.ragged_offsets else {"ragged_offsets": False}
    row |= {} if found.ragged_widths else {"ragged_widths": False}
    row |= {} if found.mask_axes == 4 else {"mask_axes": found.mask_axes}
    return row


def difference(name: str) -> str | None:
    """The first run whose tokens are not those they should be, None if all agree: with native KV those of the graph
    with mlx-lm's own cache, with quantised KV those of one row on its own."""
    vocab = model(name).config.get("vocab_size") or model(name).config["text_config"]["vocab_size"]
    wanted = requests(Sampling(), NUM_TOKENS)[:4]
    expected = {request.id: serial(name, request) for request in wanted}
    oracle = NoisyOracle(expected, 0.7, min(vocab, 97))
    cases = {
        "rows of different lengths": (Case(name, rows=3, chunk=16), STAGGERED),
        "idle rows, padding and drafts, in blocks": (
            Case(name, rows=3, bucketed=True, provider=oracle, block=16),
            STAGGERED,
        ),
    }
    for what, (case, arrivals) in cases.items():
        if (wrong := _compare(what, run(case, wanted, arrivals), expected)) is not None:
            return wrong
    return _quantised_difference(name, wanted, vocab)


def _quantised_difference(name: str, wanted: list[Request], vocab: int) -> str | None:
    """The same with 4-bit KV, rows of different lengths, drafts and a second turn out of the prompt cache."""
    alone = run(Case(name, codec="4"), wanted)
    again = [replace(r, id=f"t{r.id}", prompt=(*r.prompt, *alone.tokens[r.id], 1, 2)) for r in wanted[:2]]
    alone_again = run(Case(name, codec="4"), again)
    store = RamStore(1 << 28, recurrent="recurrent" in layout_names(model(name).shapes))
    oracle = NoisyOracle({**alone.tokens, **alone_again.tokens}, 0.7, min(vocab, 97))
    case = Case(name, rows=3, chunk=16, codec="4", provider=oracle, store=store)
    together = run(case, wanted, STAGGERED)
    wrong = _compare("rows with 4-bit KV and drafts", together, alone.tokens)
    paged = run(replace(case, block=16), again)  # what a row stored is the same, however it was kept
    wrong = wrong or _compare("paged rows out of the prompt cache", paged, alone_again.tokens)
    return wrong or (None if store.counters.hits == len(again) else "the prompt cache finds nothing again")


def _compare(what: str, outcome: Outcome, expected: Mapping[str, list[int]]) -> str | None:
    errors = [event.error for event in outcome.events if event.error]
    if errors:
        return f"{what}: {errors[0]}"
    return None if outcome.tokens == expected else f"{what} give other tokens than they should"


def serial(name: str, request: Request) -> list[int]:
    """Greedy tokens of the bare graph."""
    module = tiny(name)
    assert request.max_tokens is not None
    tokens: Sequence[int] = request.prompt
    made: list[int] = []
    caches = None if name in RECOMPUTE else list(make_caches(module))
    while len(made) < request.max_tokens:
        logits = module(mx.array([tokens])) if caches is None else module(mx.array([tokens]), cache=caches)
        made.append(int(mx.argmax(logits[0, -1])))
        tokens = [*tokens, made[-1]] if caches is None else [made[-1]]
    return made


if __name__ == "__main__":
    names = sys.argv[1:] or list(FAMILIES)
    table = json.loads(TABLE.read_text("utf-8")) if sys.argv[1:] else {}
    for name in names:
        table[name] = probe(name)
        print(name, table[name], flush=True)
    lines = [f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
