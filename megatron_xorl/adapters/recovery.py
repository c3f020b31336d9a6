"""What a file of adapter tensors holds, told from its keys and shapes: format, targets, ranks.

The one idea: keys are parsed into factors, and the format's own table (``adapters.formats``) is then computed from those factors
and compared with the file both ways. A key that is left over, an expert or half a pair that is missing, a shape that does not fit
its partner is an error, whoever wrote the file.

Known beside the three formats: XoRL's spelling of the head, ``lm_head.lora_embedding_A``. Refused: any other key, by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_xorl.adapters.formats import EXPERT_KEYS, PREFIX, Entry, file_entries, is_bank
from megatron_xorl.adapters.inventory import Factor, projection_factors
from megatron_xorl.adapters.patterns import pattern_value
from megatron_xorl.adapters.projections import Projection
from megatron_xorl.errors import AdapterError, nearest

__all__ = ["FILE_DTYPES", "Recovered", "model_order", "recover"]

FILE_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes that factors may have, as safetensors spells them."""

_LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
assert {key: leaf for leaf, key in EXPERT_KEYS.items()} == _LEAVES

# Model order within a layer; the second column is how Megatron cuts the base, the third the region.
_ORDER: dict[str, tuple[str, str]] = {
    "self_attn.q_a_proj": ("replicated", "attention"),
    "self_attn.q_b_proj": ("column", "attention"),
    "self_attn.kv_a_proj_with_mqa": ("replicated", "attention"),
    "self_attn.kv_b_proj": ("column", "attention"),
    "self_attn.o_proj": ("row", "attention"),
    "mlp.gate_proj": ("column", "dense_mlp"),
    "mlp.up_proj": ("column", "dense_mlp"),
    "mlp.down_proj": ("row", "dense_mlp"),
    "mlp.experts.gate_proj": ("column", "routed_experts"),
    "mlp.experts.up_proj": ("column", "routed_experts"),
    "mlp.experts.down_proj": ("row", "routed_experts"),
    "mlp.shared_experts.gate_proj": ("column", "shared_experts"),
    "mlp.shared_experts.up_proj": ("column", "shared_experts"),
    "mlp.shared_experts.down_proj": ("row", "shared_experts"),
    "lm_head": ("vocab", "lm_head"),
}
_PLACES = {place: index for index, place in enumerate(_ORDER)}

_KEY = re.compile(
    re.escape(PREFIX)
    + r"(?:model\.layers\.(?P<layer>\d{1,6})\.(?:(?P<plain>self_attn\.\w+|mlp\.(?:shared_experts\.)?\w+_proj)"
    r"|mlp\.experts\.(?P<shared>w[123])|mlp\.experts\.(?P<expert>\d{1,6})\.(?P<leaf>\w+_proj)"
    r"|mlp\.experts(?P<inner>\.base_layer)?)|(?P<head>lm_head))"
    r"\.lora_(?:(?P<side>[AB])\.weight|embedding_(?P<alias>[AB]))",
    re.ASCII,
)

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""``{key: (shape, dtype as safetensors spells it)}``."""


@dataclass(frozen=True)
class Recovered:
    """What a file holds: its format, its factors in model order, its tensors, and how the file spells each of them."""

    format: str
    factors: tuple[Factor, ...]
    entries: tuple[Entry, ...]
    spelled: dict[str, str]


@dataclass
class _Found:
    """The tensors of one target: shapes by side, and the experts named in keys."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    experts: int = 0


def recover(shapes: Shapes, document: Mapping[str, object], source: str) -> Recovered:
    """Return what a file holds.

    Args:
        shapes: of every tensor.
        document: ``adapter_config.json``; only ``r`` and ``rank_pattern`` are read, and only for fused banks.
        source: of the file, for messages.

    Raises:
        AdapterError: a key that is no factor, two formats in one file, half a pair, missing experts, or shapes that do not fit.
    """
    if not shapes:
        raise AdapterError(f"{source} holds no tensor; export the adapter again")
    parsed = {key: _parse(key, source) for key in shapes}
    format = _format(parsed, source)
    nested = {match["layer"] for match in parsed.values() if match["inner"]}
    found: dict[str, _Found] = {}
    spelled: dict[str, str] = {}
    for key, match in parsed.items():
        shape, dtype = shapes[key]
        _check_tensor(source, key, shape, dtype)
        side = match["side"] or match["alias"]
        canonical = key if match["side"] else f"{PREFIX}lm_head.lora_{side}.weight"
        if canonical in spelled:
            raise AdapterError(
                f"{source} holds {key} and {spelled[canonical]}, which are the same factor; keep one"
            )
        spelled[canonical] = key
        for target, own in _logical(match, shape, document, source, key, nested):
            item = found.setdefault(target, _Found())
            item.shapes.setdefault(side, own)
            item.dtypes.add(dtype)
            if match["expert"] is not None:
                item.experts = max(item.experts, int(match["expert"]) + 1)
    factors = _factors(found, format, source)
    entries = file_entries(factors, format)
    _compare(source, entries, {name: shapes[key][0] for name, key in spelled.items()})
    return Recovered(format, factors, entries, spelled)


def _parse(key: str, source: str) -> re.Match[str]:
    match = _KEY.fullmatch(key)
    plain = match and match["plain"]
    known = match is not None and not (plain and plain not in _ORDER)
    if match is None or not known or (match["alias"] and not match["head"]):
        raise _no_factor(key, source)
    if match["leaf"] and f"mlp.experts.{match['leaf']}" not in _ORDER:
        raise _no_factor(key, source)
    return match


def _no_factor(key: str, source: str) -> AdapterError:
    """The error of a key, with the nearest one that this family has: same layer, same side."""
    module, _, side = key.removeprefix(PREFIX).rpartition(".lora_")
    layer, side = re.search(r"\d+", module), "B" if side.startswith(("B", "embedding_B")) else "A"
    root = f"model.layers.{layer[0] if layer else 0}."
    known = ["lm_head", *(root + place for place in _ORDER if place != "lm_head")]
    close = nearest(module or key, known, n=1)
    hint = f" (nearest: {PREFIX}{close[0]}.lora_{side}.weight)" if close else ""
    return AdapterError(
        f"{source} holds {key}, which is no LoRA factor of this model family{hint}; "
        "export the adapter again, or use its own base"
    )


def _format(parsed: Mapping[str, re.Match[str]], source: str) -> str:
    kinds: dict[str, str] = {}
    for key, match in parsed.items():
        if match["shared"]:
            kinds.setdefault("sglang_shared_outer", key)
        elif match["expert"] is not None:
            kinds.setdefault("hf_peft", key)
        elif not match["plain"] and not match["head"]:
            kinds.setdefault("hf_peft_fused", key)
    if len(kinds) > 1:
        told = ", ".join(f"{key} ({format})" for format, key in kinds.items())
        raise AdapterError(f"{source} mixes formats: {told}; export the adapter again")
    return next(iter(kinds), "sglang_shared_outer")


def _check_tensor(source: str, key: str, shape: tuple[int, ...], dtype: str) -> None:
    if dtype not in FILE_DTYPES:
        raise AdapterError(
            f"{source}: {key} is {dtype}, expected one of {', '.join(FILE_DTYPES)}; export the adapter again"
        )
    axes = 3 if ".experts.w" in key else 2
    if len(shape) != axes or 0 in shape:
        raise AdapterError(
            f"{source}: {key} is {list(shape)}, expected {axes} axes and none of size zero; export the adapter again"
        )


def _logical(
    match: re.Match[str],
    shape: tuple[int, ...],
    document: Mapping[str, object],
    source: str,
    key: str,
    nested: set[str],
) -> list[tuple[str, tuple[int, ...]]]:
    """Targets that a tensor belongs to, each with the shape of its factor without an expert axis that is only implied."""
    if match["head"]:
        return [("lm_head", shape)]
    layer = f"model.layers.{match['layer']}"
    if match["plain"]:
        return [(f"{layer}.{match['plain']}", shape)]
    bank = f"{layer}.mlp.experts"
    if match["shared"]:
        return [(f"{bank}.{_LEAVES[match['shared']]}", shape)]
    if match["leaf"]:
        return [(f"{bank}.{match['leaf']}", shape)]
    inner = match["inner"] is not None
    if not inner and match["layer"] not in nested:
        inner = _alone(bank, document, source, key)
    return _unfuse(match["side"], inner, bank, shape, document, source, key)


def _alone(bank: str, document: Mapping[str, object], source: str, key: str) -> bool:
    """Whether the only wrapped parameter of a bank is gate_up_proj, as the targets say."""
    named = document.get("target_parameters")
    listed = [str(name) for name in named] if isinstance(named, list | tuple) else []
    hits = [
        leaf
        for leaf in ("gate_up_proj", "down_proj")
        if any(f".{bank}.{leaf}".endswith(f".{name}") for name in listed)
    ]
    if len(hits) != 1:
        raise AdapterError(
            f"{source}: {key} is gate_up_proj or down_proj, and target_parameters in adapter_config.json does not say which; "
            "export the adapter again"
        )
    return hits == ["gate_up_proj"]


def _unfuse(
    side: str,
    inner: bool,
    bank: str,
    shape: tuple[int, ...],
    document: Mapping[str, object],
    source: str,
    key: str,
) -> list[tuple[str, tuple[int, ...]]]:
    """Factors of a parameter that PEFT wraps: ``inner`` gate and up, else down."""
    parameter = f"{bank}.{'gate_up_proj' if inner else 'down_proj'}"
    rank = pattern_value(document.get("rank_pattern"), parameter, document.get("r"))
    parts = 2 if inner else 1
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or rank % parts:
        raise AdapterError(
            f"{source}: adapter_config.json gives {parameter} rank {rank!r}, expected a positive number"
            f"{', even since gate and up share it' if inner else ''}"
        )
    stacked = shape[0] if side == "A" else shape[1]
    if stacked % rank or (side == "B" and shape[0] % parts):
        raise AdapterError(
            f"{source}: {key} is {list(shape)}, which rank {rank} of {parameter} in adapter_config.json does not divide"
        )
    experts, own = stacked // rank, rank // parts
    single = (own, shape[1]) if side == "A" else (shape[0] // parts, own)
    leaves = ("gate_proj", "up_proj") if inner else ("down_proj",)
    return [(f"{bank}.{leaf}", (experts, *single)) for leaf in leaves]


def _factors(found: Mapping[str, _Found], format: str, source: str) -> tuple[Factor, ...]:
    experts: dict[str, int] = {}
    for target, item in found.items():
        bank = target.rpartition(".")[0]
        lead = [shape[0] for shape in item.shapes.values() if len(shape) == 3]
        experts[bank] = max([experts.get(bank, 1), item.experts, *lead])
    factors: list[Factor] = []
    for target in sorted(found, key=model_order):
        item = found[target]
        if halves := {"A", "B"} - item.shapes.keys():
            (lost,) = halves
            raise AdapterError(
                f"{source}: {target} has lora_{'B' if lost == 'A' else 'A'} alone, lora_{lost} is missing; "
                "export the adapter again"
            )
        if len(item.dtypes) > 1:
            raise AdapterError(
                f"{source}: {target} has lora_A and lora_B of different dtypes, {', '.join(sorted(item.dtypes))}; "
                "export the adapter again"
            )
        count = experts[target.rpartition(".")[0]] if is_bank(target) else 0
        factors += _pair_of(target, item, count, source)
    return tuple(factors)


def _pair_of(target: str, item: _Found, experts: int, source: str) -> tuple[Factor, Factor]:
    a, b = item.shapes["A"], item.shapes["B"]
    if a[-2] != b[-1]:
        raise AdapterError(
            f"{source}: {target} has lora_A {list(a)} and lora_B {list(b)}, whose ranks {a[-2]} and {b[-1]} differ; "
            "export the adapter again"
        )
    place = _place(target)
    cut, region = _ORDER[place]
    layer = None if place == "lm_head" else int(target.split(".")[2])
    projection = Projection(target, region, layer, a[-1], b[-2], experts, cut)
    return projection_factors(projection, a[-2], FILE_DTYPES[item.dtypes.copy().pop()], True)


def _place(target: str) -> str:
    return target if target == "lm_head" else target.split(".", 3)[3]


def model_order(target: str) -> tuple[float, int]:
    """Return what sorts targets as the model has them: layer by layer, the head last."""
    layer = float("inf") if target == "lm_head" else int(target.split(".")[2])
    return layer, _PLACES[_place(target)]


def _compare(
    source: str, entries: tuple[Entry, ...], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    wanted = {entry.key: entry.shape for entry in entries}
    missing = [key for key in wanted if key not in shapes]
    extra = [key for key in shapes if key not in wanted]
    if missing or extra:
        first = f"{missing[0]} is missing" if missing else f"{extra[0]} is one too many"
        raise AdapterError(
            f"{source} is incomplete: {len(missing)} tensors missing, {len(extra)} too many ({first}); export the adapter again"
        )
    for key, shape in shapes.items():
        if shape != wanted[key]:
            raise AdapterError(
                f"{source}: {key} is {list(shape)}, expected {list(wanted[key])} as the other tensors of its bank have it; "
                "an axis of size 1 is a factor that all experts share"
            )
