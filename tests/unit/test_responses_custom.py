"""A custom tool's text out of the JSON around it: whole, in every cut, with every escape."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantou.api.responses.custom import CustomInput

TEXTS = st.text(st.sampled_from('ab"\\/\n\t\b\u2028 {}ä👋\x7f'), max_size=30) | st.text(max_size=10)


def read(written: str, cuts: list[int]) -> tuple[str, str]:
    """(what came on the way, what came at the end)"""
    reader = CustomInput()
    marks = sorted({0, len(written), *(cut for cut in cuts if cut < len(written))})
    way = "".join([reader.feed(written[lo:hi]) for lo, hi in pairwise(marks)])
    return way, reader.end()


@given(
    TEXTS,
    st.booleans(),
    st.sampled_from([(", ", ": "), (",", ":")]),
    st.lists(st.integers(0, 80), max_size=20),
)
def test_every_text_comes_as_it_was_written(
    text: str, ascii_only: bool, separators: tuple[str, str], cuts: list[int]
) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only, separators=separators)
    assert read(written, cuts) == (text, "")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "half', "half"),
        ('{"input": "half\\', "half"),
        ('{"input": "half \\ud83d', "half "),
        ('{"input": "', ""),
        ('{"inp', '{"inp'),
        ("", ""),
        ('{"more": 1, "input": "late"}', "late"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("[1]", "[1]"),
    ],
)
def test_what_is_cut_off_or_of_another_shape_is_not_lost(written: str, text: str) -> None:
    assert "".join(read(written, [3, 12])) == text
