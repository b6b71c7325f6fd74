"""How a checkpoint turns tokens into a vector or a score: pooling, norm, prompts, length. Reads JSON; knows no arrays.

The files are those of sentence-transformers: modules.json, 1_Pooling/config.json, sentence_bert_config.json and
config_sentence_transformers.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mantou.errors import ModelError
from mantou.models.checkpoint import read_config, read_json

Pooling = Literal["mean", "cls", "last", "max"]
Graph = Literal["bert", "modernbert", "decoder"]

# model_type -> whose graph; everything else is a decoder of mlx-lm.
ENCODERS: Mapping[str, Graph] = {
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "camembert": "bert",
    "modernbert": "modernbert",
}
_POOLINGS: Mapping[str, Pooling] = {
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "max_tokens": "max",
    "max": "max",
    "lasttoken": "last",
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_INSTRUCT = "Instruct: "


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the folder says. `pooling` is empty for a cross-encoder, which scores a pair of texts itself.

    prompts: name -> text put in front of the input; default_prompt: the one that is used unasked.
    instruction: the form of a task in words, with {instruction} and {text}; None = the model was not trained on one.
    """

    graph: Graph
    model_type: str
    pooling: tuple[Pooling, ...]
    normalize: bool
    max_tokens: int  # of one input, special tokens included
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    instruction: str | None = None
    sigmoid: bool = True  # of a cross-encoder's score
    end_token: int | None = None  # what a decoder's tokenizer may have to add at the end
    notes: tuple[str, ...] = ()

    @property
    def scores(self) -> bool:
        """Whether this is a cross-encoder."""
        return not self.pooling


def is_embedding_folder(folder: Path) -> bool:
    """Whether a checkpoint says by itself that it embeds or ranks instead of chatting."""
    if (folder / "modules.json").is_file():
        return True
    config = read_json(folder / "config.json")
    return str(config.get("model_type")) in ENCODERS


def read_recipe(folder: Path) -> Recipe:
    """Raises ModelError, in one sentence, for a checkpoint that neither embeds nor ranks in a way that is known."""
    config = read_config(folder)
    model_type = str(config["model_type"])
    graph = ENCODERS.get(model_type, "decoder")
    if graph == "decoder" and (config.get("is_causal") is False or config.get("use_bidirectional_attention")):
        raise ModelError(
            f"{folder} is a {model_type} that reads in both directions, which mlx-lm's graph does not; "
            "choose another embedding model."
        )
    max_tokens = _max_tokens(folder, config, graph)
    if any("ForSequenceClassification" in name for name in config.get("architectures") or ()):
        return _cross_encoder(folder, config, graph, max_tokens)
    pooling, normalize, notes = _pooling(folder, graph)
    settings = _optional(folder / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items() if text}
    default = settings.get("default_prompt_name")
    return Recipe(
        graph=graph,
        model_type=model_type,
        pooling=pooling,
        normalize=normalize,
        max_tokens=max_tokens,
        prompts=prompts,
        default_prompt=default if default in prompts else None,
        instruction=_instruction(prompts, graph),
        end_token=_end_token(config) if graph == "decoder" else None,
        notes=notes,
    )


def _cross_encoder(folder: Path, config: Mapping[str, Any], graph: Graph, max_tokens: int) -> Recipe:
    labels = config.get("num_labels") or len(config.get("id2label") or {"0": ""})
    if graph == "decoder" or labels != 1:
        raise ModelError(
            f"{folder} classifies ({config['model_type']}, {labels} labels); to rank, choose a cross-encoder with one "
            "label on a BERT, XLM-RoBERTa or ModernBERT graph."
        )
    own = config.get("sentence_transformers") or {}
    activation = own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    return Recipe(
        graph=graph,
        model_type=str(config["model_type"]),
        pooling=(),
        normalize=False,
        max_tokens=max_tokens,
        sigmoid=not str(activation).endswith("Identity"),
    )


def _pooling(folder: Path, graph: Graph) -> tuple[tuple[Pooling, ...], bool, tuple[str, ...]]:
    """(pooling, whether the vector is normalised, notes)."""
    path = folder / "modules.json"
    if not path.is_file():
        fallback: Pooling = "last" if graph == "decoder" else "mean"
        return (fallback,), True, (f"no modules.json: {fallback} pooling, unit length",)
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    foreign = sorted(set(kinds) - set(_KNOWN_MODULES))
    if foreign or "Pooling" not in kinds:
        raise ModelError(
            f"{folder} needs {', '.join(foreign) or 'a Pooling module'} after its graph, which mantou does not have; "
            "choose another embedding model."
        )
    place = dict(modules)["Pooling"]
    return _pooling_modes(read_json(folder / place / "config.json"), folder), "Normalize" in kinds, ()


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class, folder) of each module in order; read_json takes objects only, and this is a list."""
    import json

    try:
        rows = json.loads(path.read_text("utf-8"))
        return [(str(row["type"]).rsplit(".", 1)[-1], str(row.get("path", ""))) for row in rows]
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from None


def _pooling_modes(config: Mapping[str, Any], folder: Path) -> tuple[Pooling, ...]:
    named = config.get("pooling_mode")
    asked = (
        ([named] if isinstance(named, str) else list(named))
        if named
        else [
            key.removeprefix("pooling_mode_")
            for key, on in config.items()
            if key.startswith("pooling_mode_") and on
        ]
    )
    unknown = [mode for mode in asked if mode not in _POOLINGS]
    if unknown or not asked:
        raise ModelError(
            f"{folder} pools by {', '.join(map(str, unknown)) or 'nothing'}; "
            "mantou knows mean, cls, max and last token."
        )
    return tuple(_POOLINGS[mode] for mode in asked)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _max_tokens(folder: Path, config: Mapping[str, Any], graph: Graph) -> int:
    """What the checkpoint was made for, never more than its positions."""
    most = int(config.get("max_position_embeddings") or 512)
    if str(config["model_type"]) in ("roberta", "xlm-roberta", "camembert"):
        most -= int(config.get("pad_token_id") or 0) + 1  # positions start behind the padding's
    asked = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    if asked is None:  # a tokenizer without a limit says 1e30
        asked = _optional(folder / "tokenizer_config.json").get("model_max_length")
    return min(most, int(asked)) if isinstance(asked, int | float) and asked > 0 else most


def _instruction(prompts: Mapping[str, str], graph: Graph) -> str | None:
    """The form in which the checkpoint's own prompts state a task, with another task in it."""
    for text in prompts.values():
        if text.startswith(_INSTRUCT) and "\nQuery:" in text:
            tail = text[text.index("\nQuery:") :]
            return f"{_INSTRUCT}{{instruction}}{tail}{{text}}"
    # Qwen3-Embedding's form; copies of it come without the file that says so.
    return f"{_INSTRUCT}{{instruction}}\nQuery:{{text}}" if graph == "decoder" else None


def _end_token(config: Mapping[str, Any]) -> int | None:
    found = config.get("eos_token_id")
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, int) else None
