"""Writes what recurrent layers compute into the running layer's tape. Knows structure, no family by name.

It also tells a recurrence how long its rows are where a graph forgets to (nemotron_h): padding would stay in the state.

Convolutions are modules of the graph and are wrapped in it; recurrences are functions of mlx-lm, which graph files
import by name, so the name is replaced where it stands. Nothing changes while no tape runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.kv import tape

# (module, function): each takes `mask` and gives (output, state), the time axis of its first argument being the second.
_RECURRENCES = (
    ("mlx_lm.models.gated_delta", "gated_delta_update"),
    ("mlx_lm.models.ssm", "ssm_update"),
)


class TapedConv(nn.Module):
    """A convolution over time whose input is kept while a tape runs."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        running = tape.current()
        if running is not None and running.tape is not None:
            running.tape.convolutions.append(x)
        return self.inner(x)

    @property
    def weight(self) -> mx.array:
        return self.inner.weight


def install(module: Any) -> None:
    """Makes a loaded graph write tapes, as far as its parts are known. Calling it again changes nothing."""
    for _, parent in module.named_modules():
        for name, child in parent.children().items():
            if type(child) is nn.Conv1d and not isinstance(parent, TapedConv):
                parent[name] = TapedConv(child)
    for home, name in _RECURRENCES:
        if home in sys.modules:
            _replace(home, name)


def _replace(home: str, name: str) -> None:
    """In every graph file that imported the function by name; its home keeps it, so that a device can replace it."""
    original = getattr(sys.modules[home], name)
    recorder = _recorder(home, name)
    for place, graph in list(sys.modules.items()):
        if place.startswith("mlx_lm.models.") and place != home and getattr(graph, name, None) is original:
            setattr(graph, name, recorder)


@cache
def _recorder(home: str, name: str) -> Callable[..., Any]:
    @wraps(getattr(sys.modules[home], name))
    def record(*args: Any, **more: Any) -> Any:
        function = getattr(sys.modules[home], name)
        running = tape.current()
        if running is None or (running.tape is None and running.lengths is None):
            return function(*args, **more)
        bound = _signature(function).bind(*args, **more)
        if running.lengths is not None and "lengths" in bound.signature.parameters:
            bound.arguments["lengths"] = running.lengths
        output, state = function(*bound.args, **bound.kwargs)
        if running.tape is not None:
            running.tape.recurrences.append((state, _rerun(function, bound)))
        return output, state

    return record


_signature = cache(inspect.signature)


def _rerun(function: Callable[..., Any], bound: inspect.BoundArguments) -> tape.Rerun:
    width = next(iter(bound.arguments.values())).shape[1]

    def again(kept: mx.array) -> mx.array:
        bound.arguments["mask"] = mx.arange(width)[None] < kept[:, None]
        if "lengths" in bound.signature.parameters:
            bound.arguments["lengths"] = kept
        return function(*bound.args, **bound.kwargs)[1]

    return again
