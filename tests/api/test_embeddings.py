"""The real embedding model behind the real server, asked by the official SDK; and its neighbours."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file

from mantou import Model, load
from mantou.chat.tokenizer import Tokenizer
from mantou.errors import BadRequest, ConfigError, MantouError
from mantou.models.checkpoint import read_json
from tests import embedding_folders as folders
from tests import embedding_reference as ref
from tests.real import Server, environment, mantou, serving, tiny_folder

TEXTS = [
    "How do I reset my password?",
    "Steps to recover a forgotten login",
    "A man is eating food.",
    "Der Zug fährt um 12.30 Uhr ab 🙂",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return folders.minilm_folder()


@pytest.fixture(scope="module")
def _server(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A chat model with the embedding model beside it."""
    home = tmp_path_factory.mktemp("home")
    chat = tiny_folder(home / "tiny")
    with serving(home, chat, "--embedding-model", minilm, "--cache-dir", home / "models") as server:
        yield server.ready()


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    """A test may leave nothing in the queue."""
    yield _server
    assert _server.idle()["embeddings"]["waiting_rows"] == 0


@pytest.fixture(scope="module")
def _client(_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{_server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture
def client(server: Server, _client: openai.OpenAI) -> openai.OpenAI:
    return _client


def embed(client: openai.OpenAI, inputs: Any, **more: Any) -> np.ndarray:
    answer = client.embeddings.create(model="any", input=inputs, **more)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data])


def reason(server: Server, body: Any, path: str = "/v1/embeddings") -> dict[str, Any]:
    answer = server.post(body, path)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# ------------------------------------------------------------------ answers
def test_the_sdk_gets_the_reference_s_vectors(client: openai.OpenAI, minilm: Path) -> None:
    found = embed(client, TEXTS)  # the SDK asks for base64 by itself
    tokenizer, w = Tokenizer.load(minilm), load_file(minilm / "model.safetensors")
    config = read_json(minilm / "config.json")
    for text, vector in zip(TEXTS[:2], found[:2], strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=True)
        assert ref.cosine(vector, ref.bert(w, config, tokens, [0] * len(tokens)).mean(0)) >= 0.9999


def test_every_form_of_input_gives_the_same_vector(client: openai.OpenAI, minilm: Path) -> None:
    tokens = Tokenizer.load(minilm).encode(TEXTS[0], add_special_tokens=True)
    one = embed(client, TEXTS[0])[0]
    forms = [
        embed(client, [TEXTS[0]])[0],
        embed(client, tokens)[0],
        embed(client, [tokens, tokens])[1],
        embed(client, TEXTS[0], encoding_format="float")[0],
        embed(client, TEXTS)[0],
    ]
    assert all(np.abs(form - one).max() < 1e-5 for form in forms)


def test_base64_is_little_endian_float32(server: Server) -> None:
    ask = {"input": TEXTS[0], "user": "me", "model": "x"}
    numbers = server.post({**ask, "encoding_format": "float"}, "/v1/embeddings").json()
    packed = server.post({**ask, "encoding_format": "base64"}, "/v1/embeddings").json()
    values = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.abs(values - np.array(numbers["data"][0]["embedding"], np.float32)).max() < 1e-6
    assert packed["usage"] == numbers["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert packed["object"] == "list"


def test_dimensions_cut_and_bring_back_to_unit_length(client: openai.OpenAI) -> None:
    whole, cut = embed(client, TEXTS), embed(client, TEXTS, dimensions=64)
    assert cut.shape == (len(TEXTS), 64)
    assert np.abs(cut - ref.unit(whole[:, :64])).max() < 1e-5


def test_truncation_is_asked_for_and_keeps_the_end_token(client: openai.OpenAI, server: Server) -> None:
    long = "word " * 300
    error = reason(server, {"input": ["short", long]})
    assert error["code"] == "context_length_exceeded"
    assert "input[1] has 302 tokens" in error["message"]
    assert "256" in error["message"]
    cut = embed(client, long, extra_body={"truncate": True})[0]
    assert np.abs(cut - embed(client, "word " * 254)[0]).max() < 1e-5


def test_many_clients_at_once_get_their_own_vectors_while_a_chat_goes_on(
    client: openai.OpenAI, server: Server
) -> None:
    alone = {text: embed(client, text)[0] for text in TEXTS}
    ask: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "the fox"}],
        "max_tokens": 200,
        "temperature": 0,
    }
    stream = client.chat.completions.create(**ask, stream=True)
    before = server.stats()["embeddings"]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(embed, client, [TEXTS[i % 4], TEXTS[(i + 1) % 4]]) for i in range(16)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        for i, job in enumerate(jobs):
            assert np.abs(job.result() - [alone[TEXTS[i % 4]], alone[TEXTS[(i + 1) % 4]]]).max() < 1e-5
    again = client.chat.completions.create(**ask)
    assert again.choices[0].message.content == text  # the batches between the steps changed no token
    after = server.stats()["embeddings"]
    assert after["rows"] - before["rows"] == 32
    assert after["batches"] - before["batches"] <= 32


def test_rerank_and_score_say_that_they_are_cosines(server: Server, client: openai.OpenAI) -> None:
    ask = {"query": TEXTS[0], "documents": [TEXTS[2], {"text": TEXTS[1]}, TEXTS[3]]}
    answer = server.post({**ask, "top_n": 2, "return_documents": True}, "/v1/rerank").json()
    best = answer["results"][0]
    assert (best["index"], best["document"]) == (1, {"text": TEXTS[1]})
    assert (answer["method"], len(answer["results"])) == ("cosine", 2)
    vectors = embed(client, TEXTS)
    assert abs(best["relevance_score"] - ref.cosine(vectors[0], vectors[1])) < 1e-5
    scores = server.post({"text_1": TEXTS[0], "text_2": TEXTS[1:3]}, "/v1/score").json()
    assert scores["method"] == "cosine"
    assert [one["index"] for one in scores["data"]] == [0, 1]
    assert abs(scores["data"][0]["score"] - best["relevance_score"]) < 1e-5


def test_models_and_stats_know_the_second_model(server: Server, client: openai.OpenAI) -> None:
    served = [model.id for model in client.models.list().data][:2]
    assert served[0] == "tiny"
    assert client.models.retrieve(served[1]).id == served[1]
    stats = server.stats()["embeddings"]
    assert (stats["model"]["num_dims"], stats["model"]["pooling"]) == (384, "mean")
    assert "384 numbers, mean pooling" in server.log  # on the ready card


# ------------------------------------------------------------------ what cannot be answered
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "missing"),
        ({"input": None}, "missing"),
        ({"input": []}, "empty"),
        ({"input": ""}, "empty"),
        ({"input": ["a", ""]}, "input[1] is empty"),
        ({"input": [[]]}, "empty"),
        ({"input": ["a", 1]}, "one kind"),
        ({"input": [True]}, "one kind"),
        ({"input": {"text": "a"}}, "an object"),
        ({"input": [[1.5]]}, "one kind"),
        ({"input": [-1]}, "vocabulary of 30522"),
        ({"input": [[5], [10**12]]}, "vocabulary of 30522"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 385}, "between 1 and 384"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "instruction": "find"}, "not trained on instructions"),
        ({"input": "a", "prompt_name": "query"}, "no prompt of that name"),
        ({"input": ["a"] * 10000}, "10000 items"),
        ({"input": "a " * 100000}, "100002 tokens"),
    ],
)
def test_a_wrong_input_is_a_sentence(server: Server, body: Any, word: str) -> None:
    assert word in reason(server, body)["message"]


def test_half_a_surrogate_pair_is_a_sentence(server: Server) -> None:
    answer = server.http.post("/v1/embeddings", content=b'{"input": "a\\ud800b"}')
    assert (answer.status_code, "surrogate" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 3]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 400]}, "402 tokens"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_a_wrong_ranking_is_a_sentence(server: Server, path: str, body: Any, word: str) -> None:
    assert word in reason(server, body, path)["message"]


def test_a_chat_model_alone_tells_what_to_serve(tmp_path: Path) -> None:
    with load(str(tiny_folder(tmp_path / "tiny"))) as model, pytest.raises(BadRequest, match="embedding"):
        model.embed("a")


# ------------------------------------------------------------------ library and command line
@pytest.fixture(scope="module")
def instructed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Embedding: last token, a task in words, two prompts."""
    folder = tmp_path_factory.mktemp("qwen") / "m"
    prompts = {"query": "Instruct: w1 w2\nQuery:", "document": ""}
    folders.write(folder, folders.QWEN3, pooling="lasttoken", prompts=prompts)
    return folder


@pytest.fixture(scope="module")
def library(instructed: Path) -> Iterator[Model]:
    with load(str(instructed)) as model:
        yield model


def test_a_decoder_embeds_by_its_last_token_behind_an_instruction(library: Model, instructed: Path) -> None:
    w = load_file(instructed / "model.safetensors")
    tokenizer = Tokenizer.load(instructed)

    def want(text: str) -> np.ndarray:
        tokens = [*tokenizer.encode(text, add_special_tokens=True), 3]  # the end token that its file lacks
        return ref.unit(ref.qwen3(w, folders.QWEN3, tokens)[-1])

    assert np.abs(library.embed("w5 w6")[0] - want("w5 w6")).max() < 1e-4
    task = library.embed("w5 w6", instruction="w7")[0]
    assert np.abs(task - want("Instruct: w7\nQuery:w5 w6")).max() < 1e-4
    named = library.embed("w5 w6", prompt_name="query")[0]
    assert np.abs(named - want("Instruct: w1 w2\nQuery:w5 w6")).max() < 1e-4
    assert library.embed(["w1", "w2 w3"]).shape == (2, 32)
    (score,) = library.score([("w5 w6", "w5 w6")])
    assert (
        abs(score - float(named @ want("w5 w6"))) < 1e-4
    )  # the query behind its prompt, the document as it is


def test_an_embedding_model_does_not_chat(library: Model) -> None:
    with pytest.raises(BadRequest, match="generates no text"):
        library.generate("w1")


def test_numbers_that_are_none_never_leave_as_null(tmp_path: Path) -> None:
    broken = folders.weights(folders.BERT)
    broken["embeddings.word_embeddings.weight"][4] = np.nan
    folders.write(tmp_path / "m", folders.BERT, changed=broken)
    with load(str(tmp_path / "m")) as model:
        assert np.isfinite(model.embed("w5")).all()
        with pytest.raises(MantouError, match=r"not finite for input\[1\]") as caught:
            model.embed(["w5", "w0", "w6"])
    assert caught.value.status == 500


def test_a_cross_encoder_ranks_and_does_not_embed(tmp_path: Path) -> None:
    w = folders.write(tmp_path / "m", folders.BERT, pooling=None, ranks=True)
    with load(str(tmp_path / "m")) as model:
        (score,) = model.score([("w1 w2", "w3")])
        with pytest.raises(BadRequest, match="cross-encoder"):
            model.embed("w1")
        with pytest.raises(BadRequest, match="documents\\[0\\] with the query has 83 tokens"):
            model.score([("w1", "w2 " * 79)])
        assert len(model.score([("w1", "w2 " * 79)], truncate=True)) == 1
    tokens, types = [2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1]
    first = ref.bert(w, folders.BERT, tokens, types, "bert.")[0]
    logit = ref.linear(w, "classifier", np.tanh(ref.linear(w, "bert.pooler.dense", first)))
    assert abs(score - 1 / (1 + np.exp(-logit[0]))) < 1e-5


def test_two_embedding_models_at_once_are_refused(instructed: Path) -> None:
    with pytest.raises(ConfigError, match="leave --embedding-model out"):
        load(str(instructed), embedding_model=str(instructed))


def test_the_command_line_prints_a_line_a_text(instructed: Path, tmp_path: Path, library: Model) -> None:
    env = environment(tmp_path)
    done = mantou("embed", instructed, "--dimensions", "8", env=env, stdin="w1 w2\nw3\n")
    assert done.returncode == 0, done.stderr
    found = np.array([json.loads(line) for line in done.stdout.splitlines()])
    assert np.abs(found - library.embed(["w1 w2", "w3"], dimensions=8)).max() < 1e-5
    done = mantou("embed", instructed, "--query", "w1", "--json", "-t", "w1", "-t", "w2", env=env)
    scores = json.loads(done.stdout)
    assert len(scores) == 2
    assert all(-1 <= score <= 1.001 for score in scores)
