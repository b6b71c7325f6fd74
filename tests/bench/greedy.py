"""`python -m tests.bench.greedy FOLDER WORK`: greedy text of the CPU kernels next to plain MLX, and every near-tie.

Twenty prompts, 128 tokens each. mantou writes them with its kernels; plain MLX then reads each text in one forward, and
every token that is not its own first choice is listed with the margin: how much higher plain MLX holds its choice. A
margin of the size of rounding is a tie. Steps (`make`, `write`, `read`) keep their results in WORK, so that the slow
one can be run in pieces. Knows no speed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

NUM_TOKENS = 128
QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis in two sentences.",
    "Write a Python function that adds two numbers.",
    "Name three colours.",
    "Why is the sky blue?",
    "Tell me a short story about a fox.",
    "How do I boil an egg?",
    "List the planets of the solar system.",
    "What is a prime number?",
    "Translate 'good morning' into French.",
)
OPENINGS = (
    "Once upon a time",
    "The history of Rome begins",
    "In mathematics, a group is",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The three laws of motion are",
    "Water boils at",
    "A good recipe for bread needs",
    "The largest animal on Earth",
    "To install the package, run",
)


def make(folder: Path, form: str, target: Path) -> None:
    """The model with other weights: bf16 = the same numbers unpacked, 8-bit = those packed again."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.utils import dequantize_model

    model, _ = load(str(folder))  # type: ignore[misc]  # two values without return_config
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    model = dequantize_model(model)
    model.set_dtype(mx.bfloat16 if form == "bf16" else mx.float32)
    if form == "8bit":
        nn.quantize(model, group_size=64, bits=8)
        config["quantization"] = {"group_size": 64, "bits": 8}
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and "index" not in file.name:
            shutil.copy(file, target / file.name)
    config["torch_dtype"] = "bfloat16" if form == "bf16" else "float32"
    (target / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(model.parameters())))


def prompts(folder: Path) -> list[list[int]]:
    from mantou.chat.template import ChatTemplate
    from mantou.chat.tokenizer import Tokenizer
    from mantou.data import Message

    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer)
    chats = [list(template.render([Message(role="user", content=q)]).tokens) for q in QUESTIONS]
    return [*chats, *(list(tokenizer.encode(opening, add_special_tokens=True)) for opening in OPENINGS)]


def write(folder: Path) -> dict[str, Any]:
    """mantou's texts, with all prompts in one batch."""
    from mantou.build import load_step
    from mantou.config import Config
    from mantou.data import Request, Sampling

    asked = prompts(folder)
    step, info = load_step(folder, Config(model=str(folder), batch=len(asked)))
    assert any(note.startswith("CPU kernels:") for note in info.notes), info.notes
    for number, prompt in enumerate(asked):
        step.submit(Request(str(number), tuple(prompt), Sampling(), max_tokens=NUM_TOKENS))
    texts: list[list[int]] = [[] for _ in asked]
    while step.busy:
        step.advance()
        for event in step.take_events():
            assert event.error is None, event.error
            texts[int(event.request_id)] += event.tokens
    return {"prompts": asked, "texts": texts, "notes": list(info.notes)}


def read(folder: Path, written: dict[str, Any], chosen: range) -> list[dict[str, Any]]:
    """What plain MLX holds of the texts: in a process whose MLX nobody has touched."""
    from mlx_lm import load

    model, _ = load(str(folder))  # type: ignore[misc]  # two values without return_config
    found: list[dict[str, Any]] = []
    for number in chosen:
        prompt, text = written["prompts"][number], written["texts"][number]
        logits = model(mx.array([prompt + text[:-1]]))[0, len(prompt) - 1 :].astype(mx.float32)
        best = mx.argmax(logits, axis=-1)
        taken = mx.take_along_axis(logits, mx.array(text)[:, None], axis=-1)[:, 0]
        margins = (logits.max(axis=-1) - taken).tolist()
        differ = [
            {"at": at, "ours": ours, "plain": plain, "margin": margins[at]}
            for at, (ours, plain) in enumerate(zip(text, best.tolist(), strict=True))
            if ours != plain
        ]
        found.append({"prompt": number, "tokens": len(text), "differ": differ})
        print(
            f"prompt {number}: {len(text)} tokens, {len(differ)} other choices", file=sys.stderr, flush=True
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| prompt | token | ours | plain MLX | margin |", "|---|---|---|---|---|"]
    lines += [
        f"| {one['prompt']} | {d['at']} | {d['ours']} | {d['plain']} | {d['margin']:.2g} |"
        for one in found
        for d in one["differ"]
    ]
    same = sum(not one["differ"] for one in found)
    total = sum(one["tokens"] for one in found)
    lines += ["", f"{same} of {len(found)} texts are plain MLX's own, {total} tokens in all."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="MLX model folder (SmolLM2 Q4_1)")
    parser.add_argument("work", type=Path)
    parser.add_argument("step", choices=("make", "write", "read", "table"))
    parser.add_argument("--form", choices=("native", "bf16", "8bit"), default="bf16")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="last", type=int, default=len(QUESTIONS) + len(OPENINGS))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    folder = args.folder if args.form == "native" else args.work / args.form
    texts = args.work / f"{args.form}.texts.json"
    if args.step == "make":
        make(args.folder, args.form, folder)
    elif args.step == "write":
        texts.write_text(json.dumps(write(folder)))
    elif args.step == "read":
        written = json.loads(texts.read_text())
        found = read(folder, written, range(args.first, args.last))
        (args.work / f"{args.form}.read.{args.first:02}.json").write_text(json.dumps(found))
    else:
        pieces = sorted(args.work.glob(f"{args.form}.read.*.json"))
        print(table([one for piece in pieces for one in json.loads(piece.read_text())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
