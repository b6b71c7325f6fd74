"""Times the model thread's steps while the prompt cache works beside rows that decode. Prints JSON; knows no HTTP.

python -m tests.bench.cache_steps MODEL SSD_FOLDER PROMPT_TOKENS
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mantou import build
from mantou.config import Config
from mantou.data import Request, Sampling
from mantou.engine.step import Step


class Scene:
    """A step, and rows that decode on it all the time."""

    def __init__(self, step: Step, vocab_size: int) -> None:
        self.step = step
        self._dice, self._vocab_size, self._serial = random.Random(1), vocab_size, 0
        self.done: set[str] = set()

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.randrange(100, self._vocab_size) for _ in range(count))

    def ask(self, prompt: Sequence[int], max_tokens: int) -> str:
        self._serial += 1
        name = str(self._serial)
        self.step.submit(Request(name, tuple(prompt), Sampling(), max_tokens))
        return name

    def run_until(self, *names: str) -> None:
        while not self.done.issuperset(names):
            if self.step.busy:
                self.step.advance()
                self._take()
            else:
                time.sleep(0.0005)  # the SSD is being read

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step.advance()
            self._take()

    def _take(self) -> None:
        for event in self.step.take_events():
            assert event.error is None, event.error
            if event.finish is not None:
                self.done.add(event.request_id)

    def phase(self, name: str, first: int) -> dict[str, Any]:
        """The steps since `first` was the number of steps, over the median of those without a prompt in them."""
        taken = self.step.times.last(self.step.counters.steps - first)
        whole, store = taken[:, 0], taken[:, 1]
        return {
            "name": name,
            "steps": len(taken),
            "median_s": float(np.median(whole)),
            "max_s": float(whole.max()),
            "store_max_s": float(store.max()),
            "store_s": float(store.sum()),
        }


def measure(step: Step, vocab_size: int, num_tokens: int) -> list[dict[str, Any]]:
    scene, phases = Scene(step, vocab_size), []
    known, evicted = scene.tokens(num_tokens), scene.tokens(num_tokens)
    for prompt in (evicted, known):  # memory holds one of them
        scene.run_until(scene.ask(prompt, 2))
    step.axes.store.flush(120)

    first = step.counters.steps
    scene.run_until(*(scene.ask(scene.tokens(20), 600) for _ in range(4)))
    phases.append(scene.phase("4 rows decode and are stored", first))

    background = [scene.ask(scene.tokens(20), 4000) for _ in range(2)]
    scene.run(50)
    for name, prompt in (
        ("a known prompt comes from memory", known),
        ("a known prompt comes from SSD", evicted),
        ("a new prompt is computed and stored", scene.tokens(num_tokens // 4)),
    ):
        first = step.counters.steps
        scene.run_until(scene.ask(prompt, 40))
        scene.run(20)
        phases.append(scene.phase(f"2 rows decode, {name}", first))
    first = step.counters.steps
    scene.run_until(*(scene.ask(scene.tokens(20), 200) for _ in range(4)))
    scene.run(20)
    phases.append(scene.phase("2 rows decode, 4 others end at once", first))
    for name in background:
        step.cancel(name)
    return phases


def main(model: str, folder: str, num_tokens: str) -> None:
    size = int(num_tokens)
    loaded, info = build.load_step(Path(model), Config(ssd_cache_dir=Path(folder)))
    budget = int(info.extra["kv_bytes_per_token"] * size * 1.5)
    loaded.axes.store.close()
    config = Config(ssd_cache_dir=Path(folder), prompt_cache_bytes=budget)
    step, info = build.load_step(Path(model), config)
    phases = measure(step, info.vocab_size, size)
    step.axes.store.close()
    print(json.dumps({"prompt_tokens": size, "phases": phases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
