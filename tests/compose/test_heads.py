"""Draft heads in the batch: what they are fed, what stays of a row, and that no answer depends on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mantou.cache.ram import RamStore
from mantou.data import Draft, DraftAsk, Request, Sampling, Speculation
from mantou.errors import ModelError
from mantou.kv.codecs import make_scheme
from mantou.models.runner import Runner
from mantou.protocols import Group
from mantou.spec.compose import ByKind
from mantou.spec.heads.kinds import kind_of, load_head
from mantou.spec.heads.provider import HeadDraft, HeadGraph
from mantou.spec.none import NoDraft
from tests.compose.harness import VOCAB, Case, model, prompts, requests, run
from tests.compose.heads import (
    eagle3_folder,
    eagle_folder,
    head_draft,
    llama_config,
    mtp_folder,
    target,
    write,
)
from tests.fakes import DictStore

GREEDY = Sampling()
KINDS = ("eagle",)
CASES = [
    ("eagle", "llama"),
    ("eagle", "gemma3_text"),
    ("eagle", "qwen3_5"),
    ("eagle3", "llama"),
    ("eagle3", "gemma3_text"),
    ("mtp", "qwen3_5"),
    ("mtp", "glm_moe_dsa"),
]


class Checked(HeadDraft):
    """Compares every guess with what the head says when it is given the whole row at once."""

    family: str
    num_checked: int
    faults: list[tuple[list[int], list[int]]]

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            if draft:
                self.num_checked += 1
                expected = from_scratch(self, self.family, list(ask.tokens), len(draft))
                if list(draft.tokens) != expected:  # the engine would not let an error through
                    self.faults.append((list(draft.tokens), expected))
        return drafts


@cache
def reader(family: str, taps: tuple[int, ...]) -> Runner:
    runner = Runner(model(family), make_scheme("off"), max_width=512)
    if taps:
        runner.tap(taps)
    runner.capture_hidden()
    return runner


@cache
def other_graph(kind: str, family: str) -> HeadGraph:
    return head_draft(kind, family).graph


def true_states(family: str, tokens: list[int], taps: tuple[int, ...]) -> mx.array:
    runner = reader(family, taps)
    runner.kv.resize(0)
    runner.kv.resize(1)
    runner.forward(Group(0, len(tokens), (len(tokens),)), [tokens], [[0]])
    hidden = runner.take_hidden()
    runner.abort()
    assert hidden is not None
    return hidden


def from_scratch(provider: HeadDraft, family: str, tokens: list[int], count: int) -> list[int]:
    """The greedy guesses after `tokens`: every link of the chain runs all pairs anew."""
    graph, said = other_graph(provider.graph.kind, family), []
    hidden = true_states(family, tokens[:-1], graph.taps)
    width, known = hidden.shape[1], tokens
    for _ in range(count):
        graph.kv.resize(0)
        graph.kv.resize(1)
        graph.kv.begin(Group(0, width, (width,)))
        features = graph(mx.array([known[1:]], mx.int32), hidden)[:, -1:]
        graph.kv.commit(Group(0, width, (width,)), (width,))
        for token in said:  # its own estimates come one by one
            graph.kv.begin(Group(0, 1, (1,)))
            features = graph(mx.array([[token]], mx.int32), features)
            graph.kv.commit(Group(0, 1, (1,)), (1,))
        best = int(mx.argmax(graph.logits(features), axis=-1).item())
        token = best if graph.ids is None else int(graph.ids[best].item())
        said.append(token)
    return said


def checked(kind: str, family: str, **more: Any) -> Checked:
    provider = head_draft(kind, family, **more)
    provider.__class__ = Checked
    assert isinstance(provider, Checked)
    provider.family, provider.num_checked, provider.faults = family, 0, []
    return provider


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_a_head_guesses_as_if_it_had_seen_the_row_at_once(kind: str, family: str) -> None:
    """Whatever was rejected, however rows join and leave: a stale pair would change what it guesses."""
    wanted = requests(GREEDY, 9)[:4]
    provider = checked(kind, family, num_tokens=3)
    taps = provider.graph.taps
    case = Case(family, rows=3, chunk=16, provider=provider, pipelined=False, taps=taps)
    outcome = run(case, wanted, {"r3": 3})
    assert outcome.tokens == run(Case(family), wanted).tokens
    assert not provider.faults
    assert provider.num_checked > 12
    assert provider.graph.kv.num_slots == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_asked_now_and_then_catches_up(kind: str) -> None:
    """Rows that rest from guesses that do not pay must be right again afterwards."""
    provider = checked(kind, "llama", num_tokens=3)
    propose = provider.propose

    def seldom(asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return propose([replace(ask, paid_width=3 * (len(ask.tokens) % 7 == 0)) for ask in asks])

    provider.propose = seldom  # type: ignore[method-assign]
    wanted = [Request("r0", prompts()[3], GREEDY, max_tokens=84), Request("r1", (5,), GREEDY, max_tokens=20)]
    outcome = run(Case("llama", rows=2, chunk=32, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert not provider.faults
    assert provider.num_checked > 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_finds_the_pairs_of_the_first(kind: str) -> None:
    """All but the last pair, whose token was not known: a guess after it may differ, the pairs themselves may not."""
    store = RamStore(1 << 30, recurrent=False)
    first = Request("r0", prompts()[3], GREEDY, max_tokens=30)
    plain = run(Case("llama"), [first]).tokens["r0"]
    provider = head_draft(kind, "llama", store)
    assert run(Case("llama", store=store, provider=provider), [first]).tokens["r0"] == plain
    second = Request("r1", (*first.prompt, *plain, 1, 2, 3), GREEDY, max_tokens=12)
    provider = head_draft(kind, "llama", store)
    begun: list[tuple[int, int]] = []
    settled = provider._settled

    def watched(row: Any) -> bool:
        waited, done = row.ticket is not None, settled(row)
        if waited and done:
            begun.append((row.base, row.num_true))
        return done

    provider._settled = watched  # type: ignore[method-assign]
    outcome = run(Case("llama", store=store, provider=provider), [second])
    assert outcome.tokens == run(Case("llama"), [second]).tokens
    (base, num_true), *_ = begun
    assert base == 0
    assert num_true >= len(first.prompt) + len(plain) - 3


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_pairs_a_restored_row_has_a_shorter_context_and_the_same_answer(kind: str) -> None:
    store = DictStore()
    first = Request("r0", prompts()[3], GREEDY, max_tokens=20)
    plain = run(Case("llama", store=store), [first]).tokens["r0"]
    second = Request("r1", (*first.prompt, *plain, 1, 2, 3), GREEDY, max_tokens=12)
    provider = head_draft(kind, "llama")
    outcome = run(Case("llama", store=store, provider=provider), [second])
    assert store.hits
    assert outcome.tokens == run(Case("llama"), [second]).tokens
    assert outcome.step.counters.drafted_tokens > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_raises_half_way_is_right_again_for_the_rows_that_go_on(kind: str) -> None:
    provider, wanted, calls = checked(kind, "llama", num_tokens=3), requests(GREEDY, 12)[:3], []
    graph = provider.graph
    logits = graph.logits

    def failing(features: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("planted fault")
        return logits(features)

    graph.logits = failing  # type: ignore[method-assign]
    outcome = run(Case("llama", rows=3, chunk=64, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert len(calls) > 8
    assert not provider.faults


def test_a_head_reads_only_the_rows_that_ask_for_it() -> None:
    """A head is fed every forward: rows of another kind would cost it time and slots."""
    wanted = [
        replace(request, speculation=Speculation(kind))
        for request, kind in zip(requests(GREEDY), ("off", "eagle", "off", None, "off", "off"), strict=True)
    ]
    head, seen = head_draft("eagle", "llama"), set[str]()
    absorb = head.absorb
    head.absorb = lambda forwarded: (seen.update(r.id for r in forwarded.requests if r), absorb(forwarded))  # type: ignore[method-assign]
    outcome = run(Case("llama", rows=6, provider=ByKind({"off": NoDraft(), "eagle": head}, "off")), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert seen == {"r1"}


# ------------------------------------------------------------------ checkpoints
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


def test_a_head_that_reads_layers_that_the_model_has_not_is_refused() -> None:
    runner = Runner(model("llama"), make_scheme("off"), max_width=32)
    with pytest.raises(ModelError, match="reads layer 7 of its model, which has 2 layers"):
        runner.tap((0, 7))
