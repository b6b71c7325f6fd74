"""Every graph that embeds or ranks, against the same forward in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mantou.chat.tokenizer import Tokenizer
from mantou.data import TokenRow
from mantou.errors import ModelError
from mantou.models.checkpoint import read_json
from mantou.models.device import this_device
from mantou.models.embedder import Embedder, load_embedder, pool
from mantou.models.embedder_recipe import is_embedding_folder, read_recipe
from mantou.models.ops import device_ops
from mantou.models.ops.plain import PlainOps
from tests import embedding_folders as folders
from tests import embedding_reference as ref

DRAW = np.random.default_rng(3)
ROWS = [TokenRow(tuple(int(t) for t in DRAW.integers(4, 94, length))) for length in (23, 1, 9, 23, 40)]
SENTENCES = (
    "A man is eating food.",
    "How do I reset my password?",
    "x",
    "Ein längerer Satz mit Umlauten, Zahlen wie 12.345 und Emoji 🙂 am Ende!",
)


def loaded(folder: Path) -> Embedder:
    return load_embedder(folder, device_ops(this_device().kind))


def hidden_of(config: Mapping[str, Any], w: ref.Weights) -> Callable[[TokenRow], np.ndarray]:
    match config["model_type"]:
        case "modernbert":
            return lambda row: ref.modernbert(w, config, row.tokens)
        case "qwen3":
            return lambda row: ref.qwen3(w, config, row.tokens)
        case _:
            return lambda row: ref.bert(w, config, row.tokens, [0] * len(row.tokens))


@pytest.mark.parametrize("config", [folders.BERT, folders.XLM_R, folders.MODERNBERT, folders.QWEN3])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken", "max_tokens"])
def test_vectors_of_a_padded_batch_are_those_of_the_reference(
    config: Mapping[str, Any], pooling: str, tmp_path: Path
) -> None:
    hidden = hidden_of(config, folders.write(tmp_path / "m", config, pooling=pooling))
    pools = {
        "mean_tokens": lambda h: h.mean(0),
        "cls_token": lambda h: h[0],
        "lasttoken": lambda h: h[-1],
        "max_tokens": lambda h: h.max(0),
    }
    found = loaded(tmp_path / "m").run(ROWS)
    want = ref.unit(np.stack([pools[pooling](hidden(row)) for row in ROWS]))
    assert found.dtype == np.float32
    assert np.abs(found - want).max() < 1e-4
    assert min(ref.cosine(a, b) for a, b in zip(found, want, strict=True)) > 0.999999


@pytest.mark.parametrize("config", [folders.BERT, folders.XLM_R, folders.MODERNBERT])
def test_a_cross_encoder_scores_pairs_as_the_reference(config: Mapping[str, Any], tmp_path: Path) -> None:
    w = folders.write(tmp_path / "m", config, pooling=None, ranks=True)
    model = loaded(tmp_path / "m")
    assert model.recipe.scores
    second = 5 if config["model_type"] == "bert" else None
    rows = [TokenRow(row.tokens, second if len(row.tokens) > 5 else None) for row in ROWS]
    want = []
    for row in rows:
        if config["model_type"] == "modernbert":
            first = ref.modernbert(w, config, row.tokens, "model.")[0]
            top = ref.layer_norm(w, "head.norm", ref.gelu(ref.linear(w, "head.dense", first)), 1e-5)
            logit = ref.linear(w, "classifier", top)
        else:
            at = "bert." if config["model_type"] == "bert" else "roberta."
            cut = len(row.tokens) if row.second is None else row.second
            types = [0] * cut + [1] * (len(row.tokens) - cut)
            first = ref.bert(w, config, row.tokens, types, at)[0]
            dense, last = (
                ("bert.pooler.dense", "classifier")
                if at == "bert."
                else ("classifier.dense", "classifier.out_proj")
            )
            logit = ref.linear(w, last, np.tanh(ref.linear(w, dense, first)))
        want.append(1 / (1 + np.exp(-logit[0])))
    assert np.abs(model.run(rows) - np.array(want)).max() < 1e-5


def test_minilm_gives_the_reference_s_vectors() -> None:
    folder = folders.minilm_folder()
    config, w = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.load(folder)
    rows = [TokenRow(tuple(tokenizer.encode(text, add_special_tokens=True))) for text in SENTENCES]
    found = loaded(folder).run(rows)
    for row, vector in zip(rows, found, strict=True):
        want = ref.bert(w, config, row.tokens, [0] * len(row.tokens)).mean(0)
        assert ref.cosine(vector, want) >= 0.9999
        assert abs(np.linalg.norm(vector) - 1) < 1e-5


def test_plain_mlx_gives_the_same_vectors(tmp_path: Path) -> None:
    folders.write(tmp_path / "m", folders.BERT)
    plain = load_embedder(tmp_path / "m", PlainOps()).run(ROWS)
    assert np.abs(plain - loaded(tmp_path / "m").run(ROWS)).max() < 1e-5


def test_float16_checkpoints_run(tmp_path: Path) -> None:
    w = folders.write(tmp_path / "m", folders.BERT)
    exact = loaded(tmp_path / "m").run(ROWS)
    half = {name: value.astype(np.float16) for name, value in w.items()}
    folders.write(tmp_path / "half", folders.BERT, changed=half)
    assert min(map(ref.cosine, exact, loaded(tmp_path / "half").run(ROWS))) > 0.9999


def test_padding_never_reaches_a_pooled_vector() -> None:
    hidden, lengths = mx.array(DRAW.standard_normal((2, 6, 8)), mx.float32), mx.array([3, 6])
    poisoned = mx.where((mx.arange(6) < lengths[:, None])[..., None], hidden, mx.nan)
    for mode in ("mean", "cls", "last", "max"):
        assert mx.array_equal(pool(hidden, lengths, mode), pool(poisoned, lengths, mode))


# ------------------------------------------------------------------ what a folder says
def test_an_embedding_folder_is_told_from_a_chat_model(tmp_path: Path) -> None:
    folders.write(tmp_path / "bert", folders.BERT, pooling=None)
    folders.write(tmp_path / "embedder", folders.QWEN3, pooling="lasttoken")
    folders.write(tmp_path / "chat", folders.QWEN3, pooling=None)
    found = {name: is_embedding_folder(tmp_path / name) for name in ("bert", "embedder", "chat")}
    assert found == {"bert": True, "embedder": True, "chat": False}
    assert read_recipe(tmp_path / "chat").pooling == ("last",)


def test_positions_bound_the_length_and_roberta_s_start_behind_the_padding(tmp_path: Path) -> None:
    for config, most in ((folders.BERT, 64), (folders.XLM_R, 62), (folders.MODERNBERT, 64)):
        folders.write(tmp_path / "m", config)
        assert read_recipe(tmp_path / "m").max_tokens == most
        row = TokenRow(tuple(range(4, 4 + 30)) + tuple(range(4, 4 + most - 30)))
        assert np.isfinite(loaded(tmp_path / "m").run([row])).all()


@pytest.mark.parametrize(
    ("config", "options", "word"),
    [
        (folders.BERT, {"pooling": "weightedmean_tokens"}, "weightedmean"),
        ({**folders.BERT, "hidden_act": "mish"}, {}, "mish"),
        ({**folders.BERT, "num_labels": 3}, {"ranks": True}, "3 labels"),
        ({**folders.QWEN3, "use_bidirectional_attention": True}, {}, "both directions"),
        ({**folders.BERT, "hidden_size": 64}, {}, "do not fit"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_in_one_sentence(
    config: Mapping[str, Any], options: Mapping[str, Any], word: str, tmp_path: Path
) -> None:
    small = folders.weights(folders.BERT) if config.get("hidden_size") == 64 else None
    folders.write(tmp_path / "m", config, changed=small, **options)
    with pytest.raises(ModelError, match=word) as caught:
        loaded(tmp_path / "m")
    assert "\n" not in caught.value.message
