"""Draft heads in their real layouts, small and random, for the tiny models of the matrix."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx

from mantou.cache.none import NoStore
from mantou.kv.codecs import make_scheme
from mantou.models.runner import Runner
from mantou.protocols import CacheKey
from mantou.sampling.sampler import DeviceSampler
from mantou.spec.cost import StepCosts
from mantou.spec.heads.assistant import Assistant
from mantou.spec.heads.dflash2 import DFlash2
from mantou.spec.heads.drawing import GraphDraft
from mantou.spec.heads.dspark import DSpark
from mantou.spec.heads.eagle import Eagle
from mantou.spec.heads.eagle3 import Eagle3
from mantou.spec.heads.kinds import HEADS
from mantou.spec.heads.mtp import Mtp
from mantou.spec.heads.parts import Target

from .families import FAMILIES
from .harness import VOCAB, model, own_model


def target(family: str) -> Target:
    runner = Runner(own_model(family), make_scheme("off"), max_width=32)
    return Target(
        family,
        VOCAB,
        mx.float32,
        runner.vocabulary(),
        plan=make_scheme("off").plan,
        install=lambda module: (),
        num_layers=len(model(family).module.layers),
        shapes=model(family).shapes,
    )


def write(
    folder: Path,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    bits: int = 0,
    **more: mx.array,
) -> Path:
    """A checkpoint of random weights, packed if `bits` say so; norms near 1."""
    keys = mx.random.split(mx.random.key(3), len(shapes))
    weights = {
        name: (1.0 + 0.1 * mx.random.normal(shape, key=key))
        if len(shape) == 1
        else mx.random.normal(shape, key=key) * shape[-1] ** -0.5
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    if bits:
        for name in [
            n for n, w in weights.items() if w.ndim == 2 and w.shape[-1] % 32 == 0 and ".gate." not in n
        ]:
            stem = name.removesuffix(".weight")
            packed = mx.quantize(weights.pop(name), 32, bits)
            weights |= dict(zip((f"{stem}.weight", f"{stem}.scales", f"{stem}.biases"), packed, strict=True))
        config = {**config, "quantization": {"group_size": 32, "bits": bits}}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **more})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def layer_shapes(prefix: str, width: int, inputs: int | None = None) -> dict[str, tuple[int, ...]]:
    """A decoder layer of 4 heads of 16, 2 for keys and values."""
    inputs = inputs or width
    return {
        f"{prefix}.self_attn.q_proj.weight": (64, inputs),
        f"{prefix}.self_attn.k_proj.weight": (32, inputs),
        f"{prefix}.self_attn.v_proj.weight": (32, inputs),
        f"{prefix}.self_attn.o_proj.weight": (width, 64),
        f"{prefix}.mlp.gate_proj.weight": (96, width),
        f"{prefix}.mlp.up_proj.weight": (96, width),
        f"{prefix}.mlp.down_proj.weight": (width, 96),
        f"{prefix}.post_attention_layernorm.weight": (width,),
    }


def llama_config(width: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        **more,
    }


def eagle_folder(family: str, folder: Path, *, plain: bool = False) -> Path:
    """`plain`: as EAGLE publishes them; else with the norms and the short vocabulary of our own."""
    width = target(family).hidden_size
    shapes = {"fc.weight": (width, 2 * width), **layer_shapes("layers.0", width)}
    if plain:
        return write(
            folder,
            llama_config(width),
            {**shapes, "fc.bias": (width,), "embed_tokens.weight": (VOCAB, width)},
        )
    shapes |= {"norm.weight": (width,), "layers.0.input_layernorm.weight": (width,)}
    ids = mx.array(sorted({*range(0, VOCAB, 2), *range(40)}))
    return write(folder, llama_config(width), shapes, d2t=ids - mx.arange(ids.size))


def eagle3_folder(family: str, folder: Path) -> Path:
    width = target(family).hidden_size
    shapes = {
        "fc.weight": (width, 3 * width),
        **layer_shapes("midlayer", width, 2 * width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (60, width),
    }
    ids = mx.array(sorted({*range(0, VOCAB, 2), *range(11)})[:60] + list(range(81, 81 + 60))[: 60 - 54])
    layers = len(model(family).module.layers)
    config = llama_config(width, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers]})
    return write(folder, config, shapes, d2t=ids[:60] - mx.arange(60))


def dflash2_folder(family: str, folder: Path, **settings: Any) -> Path:
    """z-lab's layout, a layer with a window of 6 places and one without; `settings` of its dflash_config."""
    width, layers = target(family).hidden_size, len(model(family).module.layers)
    groups, taps, rank = width // 16, 3, 8
    shapes = _block_shapes(width) | {"candidate_selector.hidden_projection.weight": (rank, width)}
    books = mx.random.normal((2, VOCAB, rank), key=mx.random.key(9))  # wide enough to change an order
    more = {
        f"candidate_selector.{of}_codebook": books[i] for i, of in enumerate(("predecessor", "successor"))
    }
    for conv in (f"layers.{i}.{of}_conv" for i in range(2) for of in ("attention", "mlp")):
        shapes |= {f"{conv}.base_kernel": (2, taps, width)}
        shapes |= {f"{conv}.kernel_projection.weight": (2 * taps * groups, width)}
    config = llama_config(width, model_type="qwen3", num_hidden_layers=2, is_causal=False)
    config |= {"architectures": ["DFlash2DraftModel"], "sliding_window": 6}
    config |= {"layer_types": ["sliding_attention", "full_attention"]}
    named = {"block_size": 5, "mask_token_id": 4, "target_layer_ids": [0, layers - 1], "selector_rank": rank}
    named |= {"conv_kernel_size": taps, "conv_group_size": 16, "selector_top_k": 4}
    return write(folder, {**config, "dflash_config": {**named, **settings}}, shapes, **more)


def _block_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """What all block drafters have, with two layers."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for i in range(2):
        shapes |= layer_shapes(f"layers.{i}", width)
        shapes |= {f"layers.{i}.self_attn.{of}_norm.weight": (16,) for of in "qk"}
        shapes[f"layers.{i}.input_layernorm.weight"] = (width,)
    return shapes


def dspark_folder(family: str, folder: Path, *, dflash: bool = False) -> Path:
    """DeepSpec's layout with both small heads, or DFlash's with neither."""
    width, layers = target(family).hidden_size, len(model(family).module.layers)
    shapes = _block_shapes(width)
    config = llama_config(width, model_type="qwen3", num_hidden_layers=2, block_size=5)
    places = {"target_layer_ids": [0, layers - 1], "mask_token_id": 4}
    if dflash:
        return write(folder, {**config, "dflash_config": places}, shapes)
    shapes |= {"markov_head.markov_w1.weight": (VOCAB, 8), "markov_head.markov_w2.weight": (60, 8)}
    shapes |= {"confidence_head.proj.weight": (1, width + 8), "confidence_head.proj.bias": (1,)}
    shapes |= {"lm_head.weight": (60, width), "embed_tokens.weight": (VOCAB, width)}
    return write(folder, {**config, **places}, shapes, d2t=mx.arange(60) // 2)


def assistant_folder(family: str, folder: Path, *, groups: int = 0, **more: Any) -> Path:
    """As Google publishes them, of 2 layers of 4 heads of 32: the first sees a window, the second everything.

    `groups`: of tokens, of which the best two are scored; 0 = every token is."""
    width, full = target(family).hidden_size, dict(FAMILIES[family]).get("global_head_dim", 32)
    shapes: dict[str, tuple[int, ...]] = {"pre_projection.weight": (48, 2 * width)}
    shapes |= {"post_projection.weight": (width, 48), "model.norm.weight": (48,)}
    shapes["model.embed_tokens.weight"] = (VOCAB, 48)
    for i, head_dim in enumerate((32, full)):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.mlp.{of}_proj.weight": (64, 48) for of in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (48, 64), f"{layer}.layer_scalar": (1,)}
        shapes |= {f"{layer}.self_attn.q_proj.weight": (4 * head_dim, 48)}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (48, 4 * head_dim)}
        shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
        for of in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{of}_layernorm.weight"] = (48,)
    text = {
        **dict(FAMILIES["gemma4_text"]),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": full,
        "vocab_size": VOCAB,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
    }
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": width, "text_config": text, **more}
    order: dict[str, mx.array] = {}
    if groups:
        shapes["masked_embedding.centroids.weight"] = (groups, 48)
        order["masked_embedding.token_ordering"] = mx.random.permutation(VOCAB, key=mx.random.key(8))
        config["centroid_intermediate_top_k"] = 2
    return write(folder, config, shapes, **order)


@cache
def _home() -> Path:
    return Path(mkdtemp(prefix="mantou-heads-"))


def flat_costs() -> StepCosts:
    return StepCosts((1, 8), (1, 2), {(r, w): 0.02 for r in (1, 8) for w in (1, 2)})


def head_draft(kind: str, family: str, store: Any = None, **changes: Any) -> GraphDraft[Any, Any]:
    folder = _home() / f"{kind}-{family}"
    graphs = {
        "eagle": lambda: Eagle(eagle_folder(family, folder), target(family)),
        "eagle3": lambda: Eagle3(eagle3_folder(family, folder), target(family)),
        "dspark": lambda: DSpark(dspark_folder(family, folder), target(family)),
        "dflash": lambda: DSpark(dspark_folder(family, folder, dflash=True), target(family)),
        "dflash2": lambda: DFlash2(dflash2_folder(family, folder), target(family)),
        "mtp": lambda: Mtp(mtp_folder(family, folder), target(family)),
        "assistant": lambda: Assistant(assistant_folder(family, folder), target(family)),
    }
    key = CacheKey(f"{kind} {family}", (), "off", "none")
    sampler = changes.pop("sampler", None) or DeviceSampler()
    provider = HEADS["dspark" if kind == "dflash" else kind].provider
    return provider(graphs[kind](), sampler, store or NoStore(), key, flat_costs(), **changes)


# ------------------------------------------------------------------ prediction layers of the models' own
def _one_layer(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a last layer in the family's graph, as mlx-lm builds it."""
    from mlx.utils import tree_flatten

    from mantou.models.load import build

    config = dict(FAMILIES[family])
    changes = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    module: Any = build(family, {**config, **changes})
    return {name: array.shape for name, array in tree_flatten(module.model.layers[0].parameters())}


def mtp_folder(family: str, folder: Path, *, bits: int = 0) -> Path:
    """As the publisher of the family names them: experts one by one or in one array, latent attention in one matrix."""
    width, config = target(family).hidden_size, dict(FAMILIES[family])
    text = config.get("text_config", config)
    qwen = family.startswith("qwen")
    prefix = "mtp" if qwen else f"model.layers.{text['num_hidden_layers']}"
    layer = f"{prefix}.layers.0" if qwen else prefix
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in _one_layer(family).items():
        if ".switch_mlp." in name and family == "qwen3_5_moe":
            experts, inner, outer = shape
            if "gate_proj" in name:
                shapes[f"{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, outer)
            elif "down_proj" in name:
                shapes[f"{layer}.mlp.experts.down_proj"] = shape
        elif ".switch_mlp." in name:
            for expert in range(shape[0]):
                shapes[f"{layer}.{name.replace('switch_mlp', f'experts.{expert}')}"] = shape[1:]
        elif "unembed_out" in name:
            rows = text["num_attention_heads"] * (text["qk_nope_head_dim"] + text["v_head_dim"])
            shapes[f"{layer}.self_attn.kv_b_proj.weight"] = (rows, text["kv_lora_rank"])
        elif "embed_q" not in name:
            shapes[f"{layer}.{name}"] = shape
    if qwen:
        shapes |= {"mtp.fc.weight": (width, 2 * width), "mtp.norm.weight": (width,)}
        shapes |= {f"mtp.pre_fc_norm_{of}.weight": (width,) for of in ("embedding", "hidden")}
    else:
        shapes |= {
            f"{layer}.eh_proj.weight": (width, 2 * width),
            f"{layer}.shared_head.norm.weight": (width,),
        }
        shapes |= {f"{layer}.{of}.weight": (width,) for of in ("enorm", "hnorm")}
        shapes[f"{layer}.shared_head.head.weight"] = shapes[f"{layer}.embed_tokens.weight"] = (VOCAB, width)
    return write(folder, {**config, "model_type": family}, shapes, bits=bits)
