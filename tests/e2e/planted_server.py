"""`python -m tests.e2e.planted_server MODEL --port N`: `mantou serve`, with faults planted behind our own seams.

A request whose session_id is FAULT gets a constraint that raises after three tokens. `--hold`: the model is not loaded
before a line comes in on standard input. `--grace S`: how long streams may go on after SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mantou import build, cli
from mantou.api import server
from mantou.config import Config
from mantou.data import ModelInfo, Request
from mantou.engine.step import Step
from tests.fakes import Exploding

FAULT = "planted fault"

_load_step, _create_server = build.load_step, server.create_server


class PlantedFaults:
    """The constraints of requests that ask for a fault; nothing for all others."""

    def make(self, request: Request) -> Exploding | None:
        return Exploding(after=3) if request.session == FAULT else None


def _planted_step(hold: bool, folder: Path, config: Config, *others: Any) -> tuple[Step, ModelInfo]:
    if hold:
        sys.stdin.readline()
    step, info = _load_step(folder, config, *others)
    step.axes = replace(step.axes, constraints=PlantedFaults())
    return step, info


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--grace", type=int, default=5)
    given, others = parser.parse_known_args()
    build.load_step = partial(_planted_step, given.hold)
    server.create_server = partial(_create_server, grace_s=given.grace)
    sys.argv = ["mantou", "serve", *others]
    cli.main()


if __name__ == "__main__":
    main()
