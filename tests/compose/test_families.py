"""Every mlx-lm family: what models/families.json promises is what the family's tiny model does."""

from __future__ import annotations

import pytest

from mantou.errors import ModelError
from mantou.models import families
from tests.compose.families import FAMILIES
from tests.compose.probe import probe


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family_batches_as_promised_or_is_refused_with_a_reason(name: str) -> None:
    row = families.table()[name]
    found = probe(name)
    assert found["supported"] == row.supported, found
    if row.supported:
        assert tuple(found["layouts"]) == row.layouts
    else:
        with pytest.raises(ModelError, match="Supported types: "):
            families.check(name)


def test_unknown_family_is_refused_with_the_list_of_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"no such family is known\. Supported types: .*llama.*qwen3"):
        families.check("not-a-model")
