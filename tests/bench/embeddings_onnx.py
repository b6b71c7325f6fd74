"""BERT in onnxruntime, for tests.bench.embeddings; run by a Python that has onnx and onnxruntime, and no mantou.

usage: embeddings_onnx.py FOLDER THREADS. Reads lines of JSON (rows of token ids) and prints JSON: seconds, vectors. The
graph has ONNX Runtime's own fused operators (attention, skip + layer norm, bias + GELU), as its optimiser makes them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file


class Graph:
    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.known: set[str] = set()

    def constant(self, name: str, value: np.ndarray) -> str:
        if name not in self.known:
            self.known.add(name)
            self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, name: str) -> str:
        return self.constant(name, self.weights[name])

    def op(self, kind: str, inputs: list[str], *, domain: str = "", **attributes: Any) -> str:
        out = f"{kind}_{len(self.nodes)}"
        outs = [out, f"{out}.mask"] if kind == "EmbedLayerNormalization" else [out]  # it must have both
        self.nodes.append(helper.make_node(kind, inputs, outs, domain=domain, **attributes))
        return out

    def matmul(self, x: str, name: str) -> str:
        return self.op("MatMul", [x, self.constant(f"{name}.T", self.weights[f"{name}.weight"].T)])

    def skip_norm(self, x: str, skip: str, norm: str, bias: str, eps: float) -> str:
        inputs = [x, skip, self.weight(f"{norm}.weight"), self.weight(f"{norm}.bias"), self.weight(bias)]
        return self.op("SkipLayerNormalization", inputs, domain="com.microsoft", epsilon=eps)


def build(folder: Path) -> bytes:
    config = json.loads((folder / "config.json").read_text())
    w, eps = load_file(folder / "model.safetensors"), float(config["layer_norm_eps"])
    graph = Graph(w)
    at = "embeddings."
    embedded = [f"{at}{part}_embeddings.weight" for part in ("word", "position", "token_type")]
    zeros = graph.op("Sub", ["ids", "ids"])
    x = graph.op(
        "EmbedLayerNormalization",
        [
            "ids",
            zeros,
            *map(graph.weight, embedded),
            graph.weight(f"{at}LayerNorm.weight"),
            graph.weight(f"{at}LayerNorm.bias"),
        ],
        domain="com.microsoft",
        epsilon=eps,
    )
    for i in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{i}."
        own = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]
        qkv = graph.constant(f"{name}qkv", np.concatenate([w[f"{one}.weight"].T for one in own], axis=1))
        bias = graph.constant(f"{name}qkv.bias", np.concatenate([w[f"{one}.bias"] for one in own]))
        seen = graph.op(
            "Attention",
            [x, qkv, bias, "lengths"],
            domain="com.microsoft",
            num_heads=config["num_attention_heads"],
        )
        out = graph.matmul(seen, f"{name}attention.output.dense")
        x = graph.skip_norm(
            out, x, f"{name}attention.output.LayerNorm", f"{name}attention.output.dense.bias", eps
        )
        up = graph.matmul(x, f"{name}intermediate.dense")
        inner = graph.op(
            "BiasGelu", [up, graph.weight(f"{name}intermediate.dense.bias")], domain="com.microsoft"
        )
        down = graph.matmul(inner, f"{name}output.dense")
        x = graph.skip_norm(down, x, f"{name}output.LayerNorm", f"{name}output.dense.bias", eps)
    graph.nodes.append(helper.make_node("Identity", [x], ["hidden"]))
    made = helper.make_graph(
        graph.nodes,
        "bert",
        [
            helper.make_tensor_value_info(n, TensorProto.INT32, s)
            for n, s in (("ids", ["B", "T"]), ("lengths", ["B"]))
        ],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", "T", config["hidden_size"]])],
        graph.tensors,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return onnx.ModelProto.SerializeToString(helper.make_model(made, opset_imports=opsets, ir_version=9))


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(build(folder), options, providers=["CPUExecutionProvider"])
    print(json.dumps({"version": onnxruntime.__version__}), flush=True)
    for line in sys.stdin:
        rows = json.loads(line)
        start = time.perf_counter()
        lengths = np.array([len(row) for row in rows], np.int32)
        ids = np.zeros((len(rows), lengths.max()), np.int32)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
        (hidden,) = session.run(None, {"ids": ids, "lengths": lengths})
        inside = (np.arange(ids.shape[1]) < lengths[:, None])[..., None]
        found = (hidden * inside).sum(1) / lengths[:, None]
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        spent = time.perf_counter() - start
        print(json.dumps({"seconds": spent, "vectors": found.tolist()}), flush=True)


main()
