"""What the checkpoints of draft heads look like: read as published, and refused where they are another model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mantou.errors import ModelError
from mantou.kv.codecs import make_scheme
from mantou.models.runner import Runner
from mantou.protocols import Group
from mantou.spec.heads.kinds import kind_of, load_head
from tests.compose.harness import VOCAB, model
from tests.compose.heads import (
    dflash2_folder,
    dspark_folder,
    eagle3_folder,
    eagle_folder,
    llama_config,
    mtp_folder,
    target,
    write,
)


def test_a_head_without_norms_and_with_its_own_embedding_is_read_as_published(tmp_path: Path) -> None:
    folder = eagle_folder("llama", tmp_path / "plain", plain=True)
    assert kind_of(folder) == "eagle"
    graph = load_head("eagle", folder, target("llama"))
    graph.kv.resize(1)
    graph.kv.begin(Group(0, 1, (1,)))
    tokens, hidden = (
        mx.array([[7]]),
        mx.random.normal((1, 1, target("llama").hidden_size), key=mx.random.key(2)),
    )
    got = graph(tokens, hidden)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mixed = mx.concatenate([weights["embed_tokens.weight"][tokens], hidden], axis=-1)
    x = mixed @ weights["fc.weight"].T + weights["fc.bias"]
    # One position attends to itself alone.
    v = (x @ weights["layers.0.self_attn.v_proj.weight"].T).reshape(1, 1, 2, 16)
    x = x + mx.repeat(v, 2, axis=2).reshape(1, 1, 64) @ weights["layers.0.self_attn.o_proj.weight"].T
    y = mx.fast.rms_norm(x, weights["layers.0.post_attention_layernorm.weight"], 1e-5)
    gate = y @ weights["layers.0.mlp.gate_proj.weight"].T
    y = gate * mx.sigmoid(gate) * (y @ weights["layers.0.mlp.up_proj.weight"].T)
    x = x + y @ weights["layers.0.mlp.down_proj.weight"].T
    np.testing.assert_allclose(np.array(got), np.array(x), atol=2e-5)


def test_a_head_that_came_packed_is_unpacked_where_packed_products_do_not_pay(tmp_path: Path) -> None:
    folder = eagle_folder("llama", tmp_path / "head")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    for name in [n for n in weights if n.endswith("_proj.weight") or n == "fc.weight"]:
        packed, scales, biases = mx.quantize(weights[name], group_size=32, bits=8)
        parts = {"weight": packed, "scales": scales, "biases": biases}
        weights |= {name.replace("weight", part): array for part, array in parts.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    rewrite(folder, lambda config: {**config, "quantization": {"group_size": 32, "bits": 8}})
    hidden = mx.random.normal((1, 1, target("llama").hidden_size), key=mx.random.key(2))
    found: list[np.ndarray] = []
    for packs in (True, False):
        modules: list[Any] = []

        def install(module: Any, into: list[Any] = modules) -> tuple[()]:
            into.append(module)
            return ()

        graph = load_head("eagle", folder, replace(target("llama"), packs=packs, install=install))
        assert any("scales" in layer for _, layer in modules[0].named_modules()) == packs
        graph.kv.resize(1)
        graph.kv.begin(Group(0, 1, (1,)))
        found.append(np.array(graph(mx.array([[7]]), hidden)))
    assert np.allclose(*found, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "continues hidden states of 32 numbers, and those of llama have"),
        ({"vocab_size": 96}, f"a vocabulary of 96 tokens, and llama has {VOCAB}"),
        ({"num_hidden_layers": 2}, "do not fit its config.json"),
    ],
)
def test_a_head_of_another_model_is_refused_in_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    width = target("llama").hidden_size
    folder = eagle_folder("llama", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    write(folder, llama_config(width, **changes), {}, **weights)
    with pytest.raises(ModelError, match=message):
        load_head("eagle", folder, target("llama"))


# ------------------------------------------------------------------ prediction layers of the models' own
OWN = ("qwen3_5", "qwen3_5_moe", "glm4_moe", "glm_moe_dsa", "deepseek_v3")


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("family", OWN)
def test_a_prediction_layer_is_read_as_its_publisher_names_it(family: str, bits: int, tmp_path: Path) -> None:
    """Dense or packed, experts stacked, norms around zero: what is fed in the batch is what a whole row gives."""
    graph = load_head("mtp", mtp_folder(family, tmp_path, bits=bits), target(family))
    tokens, hidden = (
        mx.array([[3, 7, 1, 9]]),
        mx.random.normal((1, 4, target(family).hidden_size), key=mx.random.key(1)),
    )
    graph.kv.resize(1)

    def fed(*spans: tuple[int, int]) -> np.ndarray:
        parts = []
        for lo, hi in spans:
            graph.kv.begin(Group(0, hi - lo, (hi - lo,)))
            parts.append(graph(tokens[:, lo:hi], hidden[:, lo:hi]))
            graph.kv.commit(graph.kv.geometry.group, (hi - lo,))
        graph.kv.release(0)
        return np.array(mx.concatenate(parts, axis=1))

    whole = fed((0, 4))
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(fed((0, 1), (1, 4)), whole, atol=2e-4)
    hidden = hidden * mx.array([1.0, 1.0, 1.0, 2.0])[None, :, None] + mx.array([0.0, 0, 0, 1])[None, :, None]
    assert np.abs(fed((0, 4))[0, 3] - whole[0, 3]).max() > 1e-2
    np.testing.assert_allclose(fed((0, 4))[0, :3], whole[0, :3], atol=1e-5)


def test_norms_that_are_stored_around_zero_are_the_same_layer(tmp_path: Path) -> None:
    """Publishers of Qwen store a norm's distance from 1, converters the norm itself."""
    folder = mtp_folder("qwen3_5", tmp_path / "one")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    near = {n: w - 1.0 if w.ndim == 1 else w for n, w in weights.items()}
    (tmp_path / "zero").mkdir()
    mx.save_safetensors(str(tmp_path / "zero" / "model.safetensors"), near)
    shutil.copy(folder / "config.json", tmp_path / "zero")
    tokens, hidden, found = mx.array([[3, 7]]), mx.random.normal((1, 2, 128), key=mx.random.key(1)), []
    for name in ("one", "zero"):
        graph = load_head("mtp", tmp_path / name, target("qwen3_5"))
        graph.kv.resize(1)
        graph.kv.begin(Group(0, 2, (2,)))
        found.append(np.array(graph(tokens, hidden[..., : target("qwen3_5").hidden_size])))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_a_prediction_layer_of_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = mtp_folder("qwen3_5", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 96
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="96 tokens, and qwen3_5 has"):
        load_head("mtp", folder, target("qwen3_5"))
    eagle = eagle_folder("llama", tmp_path / "eagle")
    with pytest.raises(ModelError, match="no layer that predicts further tokens"):
        load_head("mtp", eagle, target("llama"))
    with pytest.raises(ModelError, match="holds no draft head of the kind eagle but one of the kind mtp"):
        load_head("eagle", folder, target("qwen3_5"))


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_an_eagle3_head_is_read_as_published(prefix: str, tmp_path: Path) -> None:
    """One position, by hand: three states in one, both norms, keys and values of both halves, its own vocabulary."""
    folder = eagle3_folder("llama", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    renamed = {name.replace("midlayer", prefix): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    assert kind_of(folder) == "eagle3"
    width = target("llama").hidden_size
    graph = load_head("eagle3", folder, target("llama"))
    assert graph.taps == (0, 0, 1)
    graph.kv.resize(1)
    graph.kv.begin(Group(0, 1, (1,)))
    states = mx.random.normal((1, 1, 3 * width), key=mx.random.key(2))
    got = graph(mx.array([[7]]), states)
    hidden = states @ weights["fc.weight"].T
    known = target("llama").vocabulary.embed(mx.array([[7]]))

    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, weights[name], 1e-5)

    both = [norm(known, "midlayer.input_layernorm.weight"), norm(hidden, "midlayer.hidden_norm.weight")]
    v = (mx.concatenate(both, axis=-1) @ weights["midlayer.self_attn.v_proj.weight"].T).reshape(1, 1, 2, 16)
    x = hidden + mx.repeat(v, 2, axis=2).reshape(1, 1, 64) @ weights["midlayer.self_attn.o_proj.weight"].T
    y = norm(x, "midlayer.post_attention_layernorm.weight")
    gate = y @ weights["midlayer.mlp.gate_proj.weight"].T
    y = gate * mx.sigmoid(gate) * (y @ weights["midlayer.mlp.up_proj.weight"].T)
    x = x + y @ weights["midlayer.mlp.down_proj.weight"].T
    np.testing.assert_allclose(np.array(got), np.array(x), atol=2e-5)
    logits = norm(x, "norm.weight") @ weights["lm_head.weight"].T
    np.testing.assert_allclose(np.array(graph.logits(got)), np.array(logits), atol=1e-4)


def test_a_block_sees_itself_in_both_directions_and_says_how_sure_it_is(tmp_path: Path) -> None:
    """A causal block, or guesses that ignore the token before, would only cost acceptance: nothing else would show."""
    folder = dspark_folder("llama", tmp_path)
    assert kind_of(folder) == "dspark"
    graph: Any = load_head("dspark", folder, target("llama"))
    width = target("llama").hidden_size

    def run_block(last: int, mask_token: int) -> np.ndarray:
        graph.kv.resize(0)
        graph.kv.resize(1)
        graph.kv.begin(Group(0, 3, (3,)))
        graph(mx.array([[1, 2, 3]]), mx.random.normal((1, 3, 2 * width), key=mx.random.key(1)))
        graph.kv.commit(Group(0, 3, (3,)), (3,))
        graph.kv.begin(Group(0, 5, (5,)))
        graph._mask_token = mask_token
        features = graph.block(mx.array([[last]], mx.int32))
        graph.kv.abort()
        return np.array(features)

    plain = run_block(9, 4)
    assert plain.shape == (1, 5, width)
    assert np.abs(run_block(9, 5)[0, 0] - plain[0, 0]).max() > 1e-3  # the first place sees those behind it
    assert np.abs(run_block(8, 4)[0, 4] - plain[0, 4]).max() > 1e-3
    features = mx.array(plain)[:, :1]
    one, other = (mx.array([[token]]) for token in (3, 11))
    assert np.abs(np.array(graph.bias(one) - graph.bias(other))).max() > 1e-3
    assert 0 < float(graph.confidence(features, one).item()) < 1
    assert float(graph.confidence(features, one).item()) != float(graph.confidence(features, other).item())


def test_block_drafters_of_other_families_are_refused(tmp_path: Path) -> None:
    folder = dspark_folder("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma4_text"}))
    with pytest.raises(
        ModelError, match="layers of the kind gemma4_text, and mantou reads plain ones of Qwen3"
    ):
        load_head("dspark", folder, target("llama"))


def test_a_head_that_reads_layers_that_the_model_has_not_is_refused() -> None:
    runner = Runner(model("llama"), make_scheme("off"), max_width=32)
    with pytest.raises(ModelError, match="reads layer 7 of its model, which has 2 layers"):
        runner.tap((0, 7))


# ------------------------------------------------------------------ DFlash and DFlash 2
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
WINDOWS = (6, None)


class Written:
    """z-lab/dflash's draft models, written anew in numpy for one row: a context, a block and DFlash 2's greedy path.

    `causal`: of both layers, whether a place of the block sees none behind its own."""

    def __init__(self, folder: Path, causal: tuple[bool, bool] = (False, False)) -> None:
        read: Any = mx.load(str(folder / "model.safetensors"))
        self.w = {name: np.array(array, np.float64) for name, array in read.items()}
        self.causal = causal

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.w[f"{name}.weight"]

    def turned(self, x: np.ndarray, name: str, positions: np.ndarray) -> np.ndarray:
        """Heads of 16, normed and rotated."""
        x = self.norm(x.reshape(len(x), -1, 16), name)
        angles = (positions[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16))[:, None]
        low, high = x[..., :8], x[..., 8:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def attend(self, layer: int, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        at, (num, block) = f"layers.{layer}.self_attn", (len(context), len(x))
        places, both = np.arange(num + block), np.concatenate([context, x])
        queries = self.turned(x @ self.w[f"{at}.q_proj.weight"].T, f"{at}.q_norm", places[num:])
        keys = self.turned(both @ self.w[f"{at}.k_proj.weight"].T, f"{at}.k_norm", places)
        values = (both @ self.w[f"{at}.v_proj.weight"].T).reshape(num + block, -1, 16)
        back = places[num:, None] - places[None]
        hidden = (places[None] < num) & (back >= (WINDOWS[layer] or 99))
        hidden |= (places[None] >= num) & (back < 0) & self.causal[layer]
        heads: list[np.ndarray] = []
        for head in range(4):
            scores = np.where(hidden, -np.inf, queries[:, head] @ keys[:, head // 2].T / 4)
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(chances / chances.sum(-1, keepdims=True) @ values[:, head // 2])
        return np.concatenate(heads, axis=-1) @ self.w[f"{at}.o_proj.weight"].T

    def mixed(self, conv: str, x: np.ndarray, asked: np.ndarray, side: int) -> np.ndarray:
        found = np.zeros_like(x)
        for place, tap in np.ndindex(len(x), 3):
            if tap <= place:
                kernel = self.w[f"{conv}.base_kernel"][side, tap] + np.repeat(asked[place, side, tap], 16)
                found[place] += kernel * x[place - tap]
        return found

    def around(self, conv: str, x: np.ndarray, part: Any) -> np.ndarray:
        if f"{conv}.base_kernel" not in self.w:  # the first DFlash
            return part(x)
        asked = (x @ self.w[f"{conv}.kernel_projection.weight"].T).reshape(len(x), 2, 3, -1)
        return self.mixed(conv, part(self.mixed(conv, x, asked, 0)), asked, 1)

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        at = f"layers.{layer}.mlp"
        gate = x @ self.w[f"{at}.gate_proj.weight"].T
        gate = gate / (1 + np.exp(-gate)) * (x @ self.w[f"{at}.up_proj.weight"].T)
        return gate @ self.w[f"{at}.down_proj.weight"].T

    def block(self, hidden: np.ndarray, embedded: np.ndarray) -> np.ndarray:
        context, x = self.norm(hidden @ self.w["fc.weight"].T, "hidden_norm"), embedded
        for i in range(2):
            normed = self.norm(x, f"layers.{i}.input_layernorm")
            x = x + self.around(
                f"layers.{i}.attention_conv", normed, lambda y, i=i: self.attend(i, y, context)
            )
            normed = self.norm(x, f"layers.{i}.post_attention_layernorm")
            x = x + self.around(f"layers.{i}.mlp_conv", normed, lambda y, i=i: self.mlp(i, y))
        return self.norm(x, "norm")[1:]

    def path(
        self, features: np.ndarray, logits: np.ndarray, token: int
    ) -> list[tuple[dict[int, float], int]]:
        """Of each place the scores of its candidates, and the one that is taken."""
        found: list[tuple[dict[int, float], int]] = []
        for place, unary in zip(features, logits, strict=True):
            near = self.w["candidate_selector.predecessor_codebook"][token]
            near = near * (self.w["candidate_selector.hidden_projection.weight"] @ place)
            after = self.w["candidate_selector.successor_codebook"] @ near
            best = np.argsort(unary)[-4:]
            scores = {int(one): float(unary[one] + after[one]) for one in best}
            token = max(scores, key=lambda one: scores[one])
            found.append((scores, token))
        return found


def rewrite(folder: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()))))


def a_block(folder: Path, kind: str = "dflash2") -> tuple[Any, mx.array, mx.array]:
    """A drafter for llama, its block after token 9 in a context of 9 places, and their hidden states [9, D]."""
    assert kind_of(folder) == kind
    head: Any = load_head(kind, folder, target("llama"))
    hidden = mx.random.normal((1, 9, 2 * target("llama").hidden_size), key=mx.random.key(1))
    head.kv.resize(1)
    head.kv.begin(Group(0, 9, (9,)))
    head(mx.zeros((1, 9), mx.int32), hidden)
    head.kv.commit(Group(0, 9, (9,)), (9,))
    head.kv.begin(Group(0, 5, (5,)))
    return head, head.block(mx.array([[9]], mx.int32)), hidden[0]


WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOWS[0]}


@pytest.mark.parametrize(
    ("settings", "causal"),
    [
        (WINDOWED, (True, False)),
        ({**WINDOWED, "is_causal": None}, (True, False)),
        ({**WINDOWED, "is_causal": False}, (False, False)),
        ({**WINDOWED, "is_causal": True}, (True, True)),
        ({**WINDOWED, "dflash_config": {"causal": False}}, (False, False)),
    ],
)
def test_a_dflash_block_sees_what_its_publisher_shows_it(
    settings: dict[str, Any], causal: tuple[bool, bool], tmp_path: Path
) -> None:
    """The context is longer than the window; what a layer sees too much or too little would only cost acceptance."""
    folder = dspark_folder("llama", tmp_path, dflash=True)

    def windowed(config: dict[str, Any]) -> dict[str, Any]:
        return {
            **config,
            **settings,
            "dflash_config": config["dflash_config"] | settings.get("dflash_config", {}),
        }

    rewrite(folder, windowed)
    head, features, hidden = a_block(folder, "dspark")
    embedded = np.array(target("llama").vocabulary.embed(mx.array([9, 4, 4, 4, 4])), np.float64)
    expected = Written(folder, causal).block(np.array(hidden, np.float64), embedded)
    assert features.shape[1] == head.most == 4
    np.testing.assert_allclose(np.array(features[0]), expected, atol=2e-4)
    others = [(a, b) for a in (False, True) for b in (False, True) if (a, b) != causal]
    for other in others:
        differs = Written(folder, other).block(np.array(hidden, np.float64), embedded)
        assert np.abs(np.array(features[0]) - differs).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "said", "causal"),
    [
        ("dflash", {}, (False, False)),
        ("dflash", {"sliding_window_non_causal": True}, (False, False)),
        ("dflash", {"sliding_window_non_causal": False}, (True, False)),
        ("dspark", {}, (True, False)),
    ],
)
def test_windows_in_the_packaging_of_speculators(
    kind: str, said: dict[str, Any], causal: tuple[bool, bool], tmp_path: Path
) -> None:
    folder = dspark_folder("llama", tmp_path, dflash=True)

    def packed(config: dict[str, Any]) -> dict[str, Any]:
        own = {
            "block_size": config.pop("block_size"),
            "mask_token_id": config.pop("dflash_config")["mask_token_id"],
        }
        own |= {"aux_hidden_state_layer_ids": [0, 1], "speculators_model_type": kind, **said}
        return {**own, "transformer_layer_config": {**config, **WINDOWED}}

    rewrite(folder, packed)
    _, features, hidden = a_block(folder, "dspark")
    embedded = np.array(target("llama").vocabulary.embed(mx.array([9, 4, 4, 4, 4])), np.float64)
    expected = Written(folder, causal).block(np.array(hidden, np.float64), embedded)
    np.testing.assert_allclose(np.array(features[0]), expected, atol=2e-4)


@pytest.mark.parametrize("changes", [{}, {"is_causal": None}, SCALES], ids=["plain", "causal", "scaled"])
def test_a_dflash_2_block_is_what_its_publisher_computes(changes: dict[str, Any], tmp_path: Path) -> None:
    """Without its convolutions or its selector it would only be right less often: nothing else would show."""
    causal = "is_causal" in changes  # then layers with a window look back only
    folder = dflash2_folder("llama", tmp_path, **({} if causal else changes))
    if causal:
        rewrite(folder, lambda config: {n: value for n, value in config.items() if n != "is_causal"})
    vocabulary = target("llama").vocabulary
    head, features, hidden = a_block(folder)
    assert features.shape[1] == head.most == 4
    written = Written(folder, (causal, False))
    scale = changes.get("input_embedding_scale", 1.0)
    embedded = np.array(vocabulary.embed(mx.array([9, 4, 4, 4, 4])), np.float64) * scale
    expected = written.block(np.array(hidden, np.float64), embedded)
    np.testing.assert_allclose(np.array(features[0]), expected, atol=2e-4)
    logits = np.array(vocabulary.project(features)[0], np.float64) * changes.get("output_multiplier", 1.0)
    if cap := changes.get("final_logit_softcapping"):
        logits = cap * np.tanh(logits / cap)
    before, ordered = 9, 0
    for place, (wanted, token) in enumerate(written.path(expected, logits, before)):
        scores = np.array(head.scores(features[:, place : place + 1], mx.array([[before]])))[0, 0]
        assert set(np.flatnonzero(np.isfinite(scores))) == set(wanted)
        np.testing.assert_allclose(scores[[*wanted]], [*wanted.values()], atol=2e-4)
        ordered += token != logits[place].argmax()
        before = token
    assert ordered, "the selector never chose another token than the likeliest"


def test_dflash_2_in_the_packaging_of_speculators_is_the_same_drafter(tmp_path: Path) -> None:
    _, expected, _ = a_block(dflash2_folder("llama", tmp_path / "plain"))
    folder = dflash2_folder("llama", tmp_path / "packed")

    def packed(config: dict[str, Any]) -> dict[str, Any]:
        own = {n: value for n, value in config.pop("dflash_config").items() if n != "target_layer_ids"}
        own |= {"aux_hidden_state_layer_ids": [0, 1], "sliding_window_non_causal": True}
        own["speculators_config"] = {"proposal_methods": [{"speculative_tokens": 3}]}  # fewer than it can
        del config["is_causal"], config["architectures"]
        return {**own, "speculators_model_type": "dflash2", "transformer_layer_config": config}

    rewrite(folder, packed)
    head, features, _ = a_block(folder)
    assert head.most == 4
    np.testing.assert_array_equal(np.array(features), np.array(expected))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"conv_kernel_size": None}, "has no conv_kernel_size; this is not a draft head"),
        (
            {"conv_group_size": 7},
            "in groups of 7 channels and 4 candidates, which do not fit blocks of 5 places",
        ),
        ({"conv_kernel_size": 6}, "convolutions of 6 places in groups"),
        ({"selector_top_k": VOCAB + 1}, f"{VOCAB + 1} candidates, which do not fit"),
        ({"selector_rank": 9}, "do not fit its config.json"),
        (
            {"layer_types": ["sliding_attention"]},
            "layer_types that mantou does not know, or not one for each layer",
        ),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types that mantou does not know"),
        ({"sliding_window": 0}, "has no sliding_window"),
        ({"is_neox_style": False}, "rotates neighbouring channels"),
    ],
)
def test_a_dflash_2_drafter_that_is_not_whole_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = dflash2_folder("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name, value in settings.items():
        (config["dflash_config"] if name in config["dflash_config"] else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_head("dflash2", folder, target("llama"))


def test_a_dflash_2_drafter_of_fewer_tokens_is_refused(tmp_path: Path) -> None:
    folder = dflash2_folder("llama", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "d2t": mx.zeros(60, mx.int32)})
    with pytest.raises(ModelError, match="guesses among fewer tokens than its model has"):
        load_head("dflash2", folder, target("llama"))
