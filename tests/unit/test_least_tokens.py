"""What the bytes of a text prove of its tokens: never more than there are, enough to refuse what is far too long."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mantou.api.planning import check_length
from mantou.chat.token_bytes import token_bytes
from mantou.chat.tokenizer import Tokenizer
from mantou.errors import ContextOverflow
from tests.real import starter_folder
from tests.unit import chat_folders

STARTER = Tokenizer.load(starter_folder())


def trained(
    *, normalizer: normalizers.Normalizer | None = None, fallback: bool = False
) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=fallback))
    if normalizer is not None:
        made.normalizer = normalizer
    if not fallback:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=[] if fallback else alphabet,
        special_tokens=alphabet if fallback else ["<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(["hello hello \u1112\u1161\u11ab \ud55c 각각 aaaaaaaaaaaaaaaaaaaa"] * 9, trainer)
    return made


KINDS = {
    "byte-level": Tokenizer(chat_folders.byte_level(), {}),
    "composed": Tokenizer(trained(normalizer=normalizers.NFC()), {}),
    "starter": STARTER,
}
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text("\x04\x06\U000c0000 a", max_size=40),  # bytes that the starter model has no tokens for
    st.text("ah \n\u1112\u1161\u11ab\u03b1\u0313\u0301\u0345<|>", max_size=60),
    st.builds(lambda text, times: text * times, st.text(max_size=6), st.integers(0, 60)),
)


@pytest.mark.parametrize("name", KINDS)
@given(text=TEXTS)
def test_a_text_never_has_fewer_tokens_than_its_bytes_prove(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    assert tokenizer._bounds is not None
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "change",
    [
        lambda made: setattr(made, "normalizer", normalizers.NFKC()),
        lambda made: setattr(made, "normalizer", normalizers.Replace("a", "")),
        lambda made: setattr(made, "normalizer", normalizers.Strip()),
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split("a", "removed")),
        lambda made: made.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)]),
        lambda made: setattr(made, "pre_tokenizer", None),
        lambda made: setattr(made, "model", models.WordLevel({"a": 0}, "a")),
    ],
)
def test_nothing_is_proven_where_text_may_vanish(change: object) -> None:
    made = trained()
    assert token_bytes(made)
    change(made)  # type: ignore[operator]  # one of the lambdas above
    assert token_bytes(made) is None


def test_ten_megabytes_of_one_token_are_refused_before_they_are_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", slow)
    for unit in ("1", "\U0001f600", "<|im_start|>"):
        with pytest.raises(ContextOverflow, match="at least"):
            check_length(STARTER, 8192, "", unit * (10_000_000 // len(unit)))
    check_length(STARTER, 8192, "", "x" * 400_000)  # might be one token for every 81 of them
