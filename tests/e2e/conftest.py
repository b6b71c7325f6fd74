"""A tiny model, and servers for it as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real import Server, serving, tiny_folder

ROWS = 8
CONTEXT = (
    1 << 16
)  # an answer of that length lasts longer than any test, so a row only ends if somebody ends it
ENDLESS = CONTEXT - 4096  # max_tokens of such an answer
PLANTED = ("tests.e2e.planted_server",)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=CONTEXT)


@pytest.fixture
def serve(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`serve("--batch", "1")`: a server of the tiny model that the test's end stops."""
    with ExitStack() as stack:

        def start(*flags: str, module: tuple[str, ...] = ("mantou", "serve")) -> Server:
            return stack.enter_context(serving(tmp_path, tiny, *flags, module=module))

        yield start


@pytest.fixture(scope="module")
def planted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server with planted faults, one for all tests of a module."""
    with serving(tmp_path_factory.mktemp("planted"), tiny, "--batch", str(ROWS), module=PLANTED) as server:
        yield server.ready()
