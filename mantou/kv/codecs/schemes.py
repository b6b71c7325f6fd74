"""The schemes behind `--kv-quant`: which codec each layer takes. Knows shapes, no arrays and no rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from mantou.errors import ConfigError
from mantou.kv.codecs.affine import BITS, DEFAULT_GROUP, GROUP_SIZES, Affine
from mantou.kv.codecs.native import Native, Nothing
from mantou.kv.codecs.turbo import HEAD_DIMS, Codebook, Rotated
from mantou.kv.plan import KVPlan, LayerCodec, alike, make_plan
from mantou.kv.records import RecordCodec
from mantou.kv.shapes import ALL, LayerShape
from mantou.protocols import KVCodec, KVScheme

KV_CONFIG = "kv_config.json"
_NATIVE = alike(Native())
_INDEX = LayerCodec(Native(), Nothing())  # what chooses the tokens that are attended to stays exact


def _as_is(shape: LayerShape) -> LayerCodec:
    return _INDEX if shape.layout == "keys" else _NATIVE


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every layer's keys and values by one codec."""

    codec: KVCodec

    @property
    def name(self) -> str:
        return self.codec.name

    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        pair = alike(self.codec)
        return make_plan(self.name, shapes, [_INDEX if s.layout == "keys" else pair for s in shapes])


@dataclass(frozen=True, slots=True)
class Turbo:
    """Rotated keys and values in layers that keep the whole context; windows stay as they are, for they do not grow."""

    key_bits: int
    value_bits: int
    head_dims: tuple[int, ...] = HEAD_DIMS

    @property
    def name(self) -> str:
        return f"turbo k{self.key_bits}v{self.value_bits}"

    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        return make_plan(self.name, shapes, [self._codec(shape) for shape in shapes])

    def _codec(self, shape: LayerShape) -> LayerCodec:
        if shape.layout != "full" or shape.num_columns != ALL:
            return _as_is(shape)
        keys = Rotated(Affine(self.key_bits), self.head_dims)
        # Where the two differ in width the second is no plain value: latent attention keeps rotary keys there.
        same = shape.keys == shape.values
        if not same:
            return LayerCodec(keys, keys, label=f"turbo-k{self.key_bits}")
        values = Rotated(Codebook(self.value_bits), self.head_dims)
        return LayerCodec(keys, values, label=f"turbo-k{self.key_bits}v{self.value_bits}")


@dataclass(frozen=True, slots=True)
class PerLayer:
    """What a checkpoint's kv_config.json says; layers it does not name stay as they are.

    The file is a list of {"layer_idx": int, "bits": int, "group_size": int = 64}; 0 bits is native.
    """

    codecs: Mapping[int, KVCodec]
    name: str = f"mixed ({KV_CONFIG})"

    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        with_columns = {shape.layer for shape in shapes if shape.has_columns}
        if wrong := sorted(self.codecs.keys() - with_columns):
            raise ConfigError(
                f"{KV_CONFIG} gives bits to layer {wrong[0]}, which keeps no keys and values; remove that entry."
            )
        return make_plan(self.name, shapes, [self._codec(shape) for shape in shapes])

    def _codec(self, shape: LayerShape) -> LayerCodec:
        if shape.layout == "keys" or shape.layer not in self.codecs:
            return _as_is(shape)
        return alike(self.codecs[shape.layer])


@dataclass(frozen=True, slots=True)
class Delayed:
    """Another scheme, from `start` tokens of a row on; below that the row is native."""

    scheme: KVScheme
    start: int

    @property
    def name(self) -> str:
        return f"{self.scheme.name} from {self.start}"

    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        plan = self.scheme.plan(shapes)
        delayed = [
            codec if codec.keys.raw else replace(codec, start=self.start, below=_NATIVE)
            for codec in plan.codecs
        ]
        return replace(plan, name=self.name, codecs=tuple(delayed), start=self.start)


@dataclass(frozen=True, slots=True)
class InRecords:
    """Another scheme, with the bits of a cache where a device's kernels read them. `make` says which they can; layouts
    in `fetched` are brought to attention in another way."""

    scheme: KVScheme
    make: Callable[[LayerShape, LayerCodec], RecordCodec | None]
    fetched: Collection[str] = ()

    @property
    def name(self) -> str:
        return self.scheme.name

    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        plan = self.scheme.plan(shapes)
        pairs = zip(plan.shapes, plan.codecs, strict=True)
        return replace(plan, codecs=tuple(self._codec(shape, codec) for shape, codec in pairs))

    def _codec(self, shape: LayerShape, codec: LayerCodec) -> LayerCodec:
        read = shape.has_columns and shape.layout not in self.fetched
        records = self.make(shape, codec) if read else None
        return codec if records is None else LayerCodec(records, Nothing(), label=records.name)


def read_kv_config(path: Path) -> PerLayer:
    """Raises ConfigError in one sentence for a file that is missing or says something else."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"--kv-quant config needs {path.name} in {path.parent}, and there is none; use --kv-quant 8 or 4."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); write it again or use --kv-quant 8.") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} is not a list of layers; write it again or use --kv-quant 8.")
    codecs: dict[int, KVCodec] = {}
    for entry in entries:
        layer, codec = _entry(path, entry)
        if layer in codecs:
            raise ConfigError(f"{path} names layer {layer} twice; remove one of the entries.")
        codecs[layer] = codec
    return PerLayer(codecs)


def _entry(path: Path, entry: Any) -> tuple[int, KVCodec]:
    found = entry if isinstance(entry, dict) else {}
    layer, bits, group = found.get("layer_idx"), found.get("bits"), found.get("group_size", DEFAULT_GROUP)
    if not _is_count(layer) or bits not in (0, *BITS) or group not in GROUP_SIZES:
        raise ConfigError(
            f"{path} holds {json.dumps(entry)}; an entry is layer_idx from 0, bits 0 (native) or one of "
            f"{', '.join(map(str, BITS))}, and group_size {', '.join(map(str, GROUP_SIZES))}."
        )
    return layer, Affine(bits, group) if bits else Native()


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


SCHEMES: Mapping[str, Callable[[int], KVScheme]] = {
    "off": lambda group: Uniform(Native()),
    "8": lambda group: Uniform(Affine(8, group)),
    "4": lambda group: Uniform(Affine(4, group)),
    "turbo": lambda group: Turbo(8, 3),
    "turbo-k4v2": lambda group: Turbo(4, 2),
}


def make_scheme(
    name: str, folder: Path | None = None, *, group_size: int = DEFAULT_GROUP, start: int = 0
) -> KVScheme:
    """The scheme behind `--kv-quant NAME`, from `start` tokens on; `folder` holds the kv_config.json of "config".

    Raises ConfigError for an unknown name or a value that the scheme cannot take.
    """
    if name not in SCHEMES and name != "config":
        raise ConfigError(f"--kv-quant takes {', '.join([*SCHEMES, 'config'])}, not {name!r}.")
    if group_size not in (32, 64):
        raise ConfigError(f"The group size of quantised keys and values is 32 or 64, not {group_size}.")
    if start < 0 or (start and name == "off"):
        raise ConfigError(
            f"--kv-quant-start {start} needs --kv-quant and a number of tokens from 0; give both or neither."
        )
    if name == "config":
        scheme: KVScheme = read_kv_config((folder or Path()) / KV_CONFIG)
    else:
        scheme = SCHEMES[name](group_size)
    return Delayed(scheme, start) if start else scheme
