"""Draft heads in the batch: what they are fed, what stays of a row, and that no answer depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from mantou.spec.heads.provider import HeadDraft
from mantou.spec.none import NoDraft
from tests.compose.harness import VOCAB, Case, model, prompts, requests, run
from tests.compose.heads import eagle_folder, head_draft, llama_config, target, write
from tests.fakes import DictStore

GREEDY = Sampling()
FAMILIES = ("llama", "gemma3_text", "qwen3_5")
KINDS = ("eagle",)


class Checked(HeadDraft):
    """Compares every guess with what the head says when it is given the whole row at once."""

    family: str
    num_checked = 0

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            if draft:
                self.num_checked += 1
                assert list(draft.tokens) == from_scratch(self, self.family, list(ask.tokens), len(draft))
        return drafts


def true_states(family: str, tokens: list[int]) -> mx.array:
    runner = Runner(model(family), make_scheme("off"), max_width=512)
    runner.capture_hidden()
    runner.kv.resize(1)
    runner.forward(Group(0, len(tokens), (len(tokens),)), [tokens], [[0]])
    hidden = runner.take_hidden()
    runner.abort()
    assert hidden is not None
    return hidden


def from_scratch(provider: HeadDraft, family: str, tokens: list[int], count: int) -> list[int]:
    """The greedy guesses after `tokens`: every link of the chain runs all pairs anew."""
    graph, hidden, said = head_draft(provider.graph.kind, family).graph, true_states(family, tokens[:-1]), []
    for _ in range(count):
        width = len(tokens) - 1
        graph.kv.resize(1)
        graph.kv.begin(Group(0, width, (width,)))
        features = graph(mx.array([tokens[1:]], mx.int32), hidden)
        best = int(mx.argmax(graph.logits(features[:, -1:]), axis=-1).item())
        graph.kv.abort()
        token = best if graph.ids is None else int(graph.ids[best].item())
        said.append(token)
        tokens = [*tokens, token]
        hidden = mx.concatenate([hidden, features[:, -1:]], axis=1)
    return said


def checked(kind: str, family: str, **more: Any) -> Checked:
    provider = head_draft(kind, family, **more)
    provider.__class__ = Checked
    assert isinstance(provider, Checked)
    provider.family = family
    return provider


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_guesses_as_if_it_had_seen_the_row_at_once(kind: str, family: str) -> None:
    """Whatever was rejected, however rows join and leave: a stale pair would change what it guesses."""
    wanted = requests(GREEDY, 12)[:4]
    provider = checked(kind, family, num_tokens=3)
    outcome = run(Case(family, rows=3, chunk=16, provider=provider, pipelined=False), wanted, {"r3": 3})
    assert outcome.tokens == run(Case(family), wanted).tokens
    assert provider.num_checked > 15
    assert provider.graph.kv.num_slots == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_asked_now_and_then_catches_up(kind: str) -> None:
    """Rows that rest from guesses that do not pay must be right again afterwards."""
    provider = checked(kind, "llama", num_tokens=3)
    propose = provider.propose

    def seldom(asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return propose([replace(ask, paid_width=3 * (len(ask.tokens) % 7 == 0)) for ask in asks])

    provider.propose = seldom  # type: ignore[method-assign]
    wanted = [Request("r0", prompts()[3], GREEDY, max_tokens=90), Request("r1", (5,), GREEDY, max_tokens=80)]
    outcome = run(Case("llama", rows=2, chunk=32, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
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
