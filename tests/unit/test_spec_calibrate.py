from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mantou.kv.codecs import make_scheme
from mantou.models.runner import Runner
from mantou.spec import calibrate
from mantou.spec.calibrate import measure, step_costs
from tests.compose.harness import model


def draw(logits: mx.array) -> list[mx.array]:
    return [mx.argmax(logits, axis=-1)]


@pytest.fixture(params=["llama", "mamba2"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(model(request.param), make_scheme("off"), max_width=32)


def test_a_machine_is_measured_once_for_a_model(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = step_costs(runner, draw, 3, identity="one", folder=tmp_path)
    assert 0 < first.seconds(1, 1) <= first.seconds(3, 16)

    def again(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(calibrate, "measure", again)
    second = step_costs(runner, draw, 3, identity="one", folder=tmp_path)
    assert second.seconds(2, 4) == pytest.approx(first.seconds(2, 4), rel=1e-3)
    for identity, rows in (("another", 3), ("one", 4)):
        with pytest.raises(AssertionError, match="measured again"):
            step_costs(runner, draw, rows, identity=identity, folder=tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 1, "max_rows": 3, "cells": [[1, 1, -2]]}', '{"version": 9}']
)
def test_a_file_that_is_no_measurement_is_replaced(content: str, tmp_path: Path) -> None:
    runner = Runner(model("llama"), make_scheme("off"), max_width=32)
    step_costs(runner, draw, 3, identity="one", folder=tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text(content)
    assert step_costs(runner, draw, 3, identity="one", folder=tmp_path).seconds(1, 1) > 0
    assert len(path.read_text()) > 60


def test_a_folder_that_cannot_be_written_costs_a_measurement_and_no_start(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    runner = Runner(model("llama"), make_scheme("off"), max_width=32)
    assert step_costs(runner, draw, 2, identity="one", folder=blocked / "below").seconds(1, 1) > 0


def test_padding_is_dear_where_nothing_skips_it(runner: Runner) -> None:
    """Plain MLX computes every position of a forward, so a row that pads costs what the widest one does."""
    found = measure(runner, draw, 16)
    assert 0 <= found.padding <= 1
    assert step_costs(runner, draw, 16, identity="one", folder=None).held_s >= 0
    assert measure(runner, draw, 1).padding == 1.0


def test_padding_is_measured_between_a_step_without_it_and_a_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(model("llama"), make_scheme("off"), max_width=32)
    for share in (0.0, 0.5, 1.0):

        def seconds(_: Any, __: Any, width: int, num_tokens: tuple[int, ...], share: float = share) -> float:
            return 1e-4 * (sum(num_tokens) + share * (width * len(num_tokens) - sum(num_tokens)))

        monkeypatch.setattr(calibrate, "_forward_s", seconds)
        assert measure(runner, draw, 8).padding == pytest.approx(share)


def test_measuring_leaves_nothing_behind_and_stops_in_time(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = measure(runner, draw, 16).cells
    assert runner.kv.num_slots == 0
    assert (1, 1) in cells
    clock = iter(range(1000))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: float(next(clock)))
    assert set(measure(runner, draw, 16, budget_s=8.0).cells) == {
        (1, 1),
        (1, 2),
    }  # each forward takes a second here
    assert runner.kv.num_slots == 0
