"""The extension is there where CI says that it must be."""

from __future__ import annotations

import importlib.util
import os


def test_the_extension_is_built_where_it_is_required() -> None:
    required = os.environ.get("MANTOU_REQUIRE_KERNELS") == "1"
    assert not required or importlib.util.find_spec("mantou_kernels") is not None
