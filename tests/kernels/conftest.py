"""Without the extension one line says that its tests did not run; MANTOU_REQUIRE_KERNELS=1 makes that a failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

BUILT = importlib.util.find_spec("mantou_kernels") is not None

# Everything but test_presence.py needs the extension at import.
collect_ignore_glob = [] if BUILT else ["test_[!p]*.py", "test_po*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not BUILT:
        terminalreporter.write_line("kernels not built: tests/kernels ran test_presence.py only")


if BUILT:
    import mantou_kernels as kernels

    @pytest.fixture(params=kernels.runnable_kernels())
    def isa(request: pytest.FixtureRequest) -> Iterator[str]:
        """Runs the test once per instruction set that this CPU has."""
        before = kernels.select_kernels()
        yield kernels.select_kernels(request.param)
        kernels.select_kernels(before)

    @pytest.fixture(params=[1, 2])
    def threads(request: pytest.FixtureRequest) -> Iterator[int]:
        before = kernels.threads()
        kernels.set_threads(request.param)
        yield request.param
        kernels.set_threads(before)
