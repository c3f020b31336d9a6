"""How each key of a ``config.json`` becomes a field of :class:`~megatron_xorl.config.model.GlmConfig`.

The one idea: read the file's own keys, never a default that could be wrong for this model, and
refuse by name whatever would change the mathematics and is not implemented. Keys that change
nothing (``architectures``, ``use_cache``, ...) are ignored. Refused: another model type, biases,
another activation, rope scaling, another router, another quantisation, more tensors than can be
listed, two values for one fact that differ (the number of experts excepted: ``n_routed_experts`` is
used, with a warning).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from megatron_xorl.config.indexer import indexer_schedule, shown
from megatron_xorl.errors import ConfigError

__all__ = ["MODEL_TYPE", "parse_fields", "unconverted_modules"]

log = logging.getLogger(__name__)

MODEL_TYPE = "glm_moe_dsa"
# transformers 5.23: the q and kv latent norms keep the class default, not rms_norm_eps.
LATENT_NORM_EPS = 1e-6
# transformers 5.23: the indexer's k_norm.
INDEXER_NORM_EPS = 1e-6

# Far above any model of the family, far below what would fill a disk or a counter before it is noticed.
MOST_SIZE = 2**24
MOST = {"num_hidden_layers": 1000, "num_nextn_predict_layers": 1000, "n_routed_experts": 2**16}
# Every tensor becomes a row in memory: four times GLM-5.2's 59,585 take seconds, the product of the bounds above never ends.
MOST_TENSORS = 2**18
# Of modules_to_not_convert: the shipped list has 99 names of at most 42 letters.
MOST_ENTRIES, LONGEST_ENTRY, MOST_REPEATS = 2**11, 256, 3

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
# key -> the values implemented; an absent or null key means the first one
_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "tie_word_embeddings": (False,),
    "mlp_bias": (False,),
    "moe_router_dtype": ("float32",),
    "partial_rotary_factor": (1.0, 1),
}
# Of a rope group: what turns positions otherwise than theta alone does, at the value that changes nothing.
_ROPE_SCALES = ("factor", "attention_factor", "partial_rotary_factor")
_LAYER_KINDS = (
    "deepseek_sparse_attention",
    "indexed_attention",
)  # the second is transformers' own name for the first
_DTYPES = ("bfloat16", "float16", "float32")
_OTHER_EXPERTS = ("num_experts", "num_local_experts")
_INTERLEAVES = ("rope_interleave", "indexer_rope_interleave")


class _Reader:
    """Typed access to one raw mapping; every refusal names the source and the key."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {text}")

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(f"{key} is {shown(value)}, expected a whole number of at least {least}")
        return _at_most(self, key, value, MOST.get(key, MOST_SIZE))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        return self.positive(key, value)

    def positive(self, key: str, value: object) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.fail(f"{key} is {shown(value)}, expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {shown(value)}, expected true or false")
        return value


def parse_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the keyword arguments of ``GlmConfig`` for the raw content of a ``config.json``.

    Raises:
        ConfigError: see the module's docstring; the message begins with ``source``.
    """
    reader = _Reader(raw, source)
    _check_supported(reader)
    missing = [key for key in _SIZES if not reader.has(key)]
    if missing:
        raise reader.fail(
            f"{', '.join(missing)} missing; expected every size of the model in its config.json{_experts_hint(reader, missing)}"
        )
    fields: dict[str, Any] = {key: reader.whole(key) for key in _SIZES}
    layers = fields["num_hidden_layers"]
    _check_layer_types(reader, layers)
    fields |= {
        "model_type": MODEL_TYPE,
        "qk_rope_head_dim": _rope_width(reader),
        "first_k_dense_replace": _dense_layers(reader, layers),
        "n_group": reader.whole("n_group", 1),
        "topk_group": reader.whole("topk_group", 1),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "routed_scaling_factor": reader.number("routed_scaling_factor"),
        "rms_norm_eps": reader.number("rms_norm_eps"),
        "latent_norm_eps": reader.number("latent_norm_eps", LATENT_NORM_EPS),
        "indexer_norm_eps": reader.number("indexer_norm_eps", INDEXER_NORM_EPS),
        "rope_theta": _rope_theta(reader),
        **_interleaves(reader),
        "indexer_types": indexer_schedule(raw, layers, source),
        "eos_token_id": _eos(reader, fields["vocab_size"]),
        "pad_token_id": _token(
            reader, "pad_token_id", raw.get("pad_token_id"), fields["vocab_size"]
        ),
        "num_nextn_predict_layers": reader.whole("num_nextn_predict_layers", 0, least=0),
        "weight_block_size": _block_size(reader),
        "modules_to_not_convert": _unconverted(reader),
        "tie_word_embeddings": False,
        "initializer_range": reader.number("initializer_range", 0.02),
        "dtype": _dtype(reader),
    }
    _check_sizes(reader, fields)
    return fields


def _check_supported(reader: _Reader) -> None:
    found = reader.raw.get("model_type")
    if found != MODEL_TYPE:
        raise reader.fail(
            f"model_type is {shown(found)}, expected {MODEL_TYPE!r}; only the GLM-5 family is supported"
        )
    for key, allowed in _FIXED.items():
        value = reader.raw.get(key)
        same_kind = [
            item
            for item in allowed
            if value == item and isinstance(value, bool) == isinstance(item, bool)
        ]
        if value is not None and not same_kind:
            raise reader.fail(f"{key} is {shown(value)}, but only {allowed[0]!r} is supported")


def _check_layer_types(reader: _Reader, layers: int) -> None:
    kinds = reader.raw.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.fail(
            f"layer_types is {shown(kinds)}, expected a list with one entry for each of the {layers} layers"
        )
    for layer, kind in enumerate(kinds):
        if kind not in _LAYER_KINDS:
            raise reader.fail(
                f"layer_types says {shown(kind)} for layer {layer}, but only {_LAYER_KINDS[0]!r} is supported"
            )


def _experts_hint(reader: _Reader, missing: list[str]) -> str:
    other = [key for key in _OTHER_EXPERTS if reader.has(key)]
    return (
        f" ({other[0]} is not read: n_routed_experts says how many experts there are)"
        if other and "n_routed_experts" in missing
        else ""
    )


def _rope_width(reader: _Reader) -> int:
    nope = reader.whole("qk_nope_head_dim")
    if reader.has("qk_rope_head_dim"):
        width = reader.whole("qk_rope_head_dim")
        if reader.has("qk_head_dim") and reader.whole("qk_head_dim") != nope + width:
            raise reader.fail(
                f"qk_head_dim is {reader.raw['qk_head_dim']}, but qk_nope_head_dim + qk_rope_head_dim is {nope + width}"
            )
    elif reader.has("qk_head_dim"):
        width = reader.whole("qk_head_dim") - nope
        if width <= 0:
            raise reader.fail(
                f"qk_head_dim is {nope + width}, expected more than qk_nope_head_dim ({nope}); the rest is rotated"
            )
    else:
        raise reader.fail(
            "qk_rope_head_dim is missing (head_dim is not the rope width and is not read); add it or qk_head_dim"
        )
    if width <= 0 or width % 2:
        raise reader.fail(
            f"qk_rope_head_dim is {width}, expected a positive even number: rope turns pairs"
        )
    return width


def _interleaves(reader: _Reader) -> dict[str, bool]:
    """Both interleave flags; a false one is obeyed here and by no transformers, and two answers of one file are worth a line."""
    flags = {key: reader.flag(key, True) for key in _INTERLEAVES}
    off = [key for key, value in flags.items() if not value]
    if off:
        log.warning(
            "%s: %s false: obeyed here, but transformers 5.23 does not read %s and interleaves always; "
            "its model computes other values from the same weights",
            reader.source,
            " and ".join(off) + (" are" if off[1:] else " is"),
            "these keys" if off[1:] else "this key",
        )
    return flags


def _rope_theta(reader: _Reader) -> float:
    groups = {"": reader.raw}
    for key in ("rope_parameters", "rope_scaling"):
        group = reader.raw.get(key)
        if group is None:
            continue
        if not isinstance(group, Mapping):
            raise reader.fail(f"{key} is {shown(group)}, expected a mapping")
        _refuse_scaling(reader, key, group)
        groups[f"{key}."] = group
    found = {
        f"{name}rope_theta": reader.positive(f"{name}rope_theta", group["rope_theta"])
        for name, group in groups.items()
        if group.get("rope_theta") is not None
    }
    if not found:
        raise reader.fail(
            "rope_theta is missing, both in rope_parameters and at the top level; "
            "there is no safe default: GLM-5 has 1e6, GLM-5.2 8e6"
        )
    if len(set(found.values())) > 1:
        raise reader.fail(
            "; ".join(f"{key} is {value:g}" for key, value in found.items())
            + "; they must agree, remove one"
        )
    return next(iter(found.values()))


def _refuse_scaling(reader: _Reader, key: str, group: Mapping[str, Any]) -> None:
    """Refuse yarn, linear and the like, said outright or by a factor without a type."""
    for word in ("rope_type", "type"):
        kind = group.get(word)
        if kind is not None and kind != "default":
            raise reader.fail(
                f"{key} has {word} {shown(kind)}, but only 'default' (no scaling) is supported"
            )
    for word in _ROPE_SCALES:
        value = group.get(word)
        if value is not None and (isinstance(value, bool) or value != 1):
            raise reader.fail(
                f"{key}.{word} is {shown(value)}, but only 1 (no scaling) is supported"
            )


def _dense_layers(reader: _Reader, layers: int) -> int:
    kinds = reader.raw.get("mlp_layer_types")
    if kinds is None:
        return _at_most(
            reader, "first_k_dense_replace", reader.whole("first_k_dense_replace", least=0), layers
        )
    dense = sum(kind == "dense" for kind in kinds) if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise reader.fail(
            f"mlp_layer_types is {shown(kinds)}, expected {layers} words, 'dense' for the first layers and 'sparse' for the rest"
        )
    if (
        reader.has("first_k_dense_replace")
        and reader.whole("first_k_dense_replace", least=0) != dense
    ):
        raise reader.fail(
            f"first_k_dense_replace is {reader.raw['first_k_dense_replace']}, but mlp_layer_types has {dense} dense layers"
        )
    return dense


def _at_most(reader: _Reader, key: str, value: int, most: int) -> int:
    if value > most:
        raise reader.fail(f"{key} is {shown(value)}, expected at most {most}")
    return value


def _token(reader: _Reader, key: str, value: object, vocab: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise reader.fail(f"{key} is {shown(value)}, expected a token id from 0 to {vocab - 1}")
    return value


def _eos(reader: _Reader, vocab: int) -> tuple[int, ...]:
    value = reader.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    tokens = [
        token for item in ids if (token := _token(reader, "eos_token_id", item, vocab)) is not None
    ]
    if not tokens or len(tokens) != len(ids):
        raise reader.fail(f"eos_token_id is {shown(value)}, expected a token id or a list of them")
    return tuple(tokens)


def _block_size(reader: _Reader) -> tuple[int, int] | None:
    quant = reader.raw.get("quantization_config")
    if quant is None:
        return None
    if not isinstance(quant, Mapping):
        raise reader.fail(f"quantization_config is {shown(quant)}, expected a mapping")
    allowed = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3",),
        "activation_scheme": ("dynamic",),
        "scale_fmt": ("float32",),
    }
    for key, values in allowed.items():
        found = quant.get(key)
        if found not in values and not (found is None and key != "quant_method"):
            raise reader.fail(
                f"quantization_config.{key} is {shown(found)}, but only {values[0]!r} is supported (e4m3 codes, float32 scales)"
            )
    name, block = "quantization_config.weight_block_size", quant.get("weight_block_size")
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block)
    ):
        raise reader.fail(
            f"{name} is {shown(block)}, expected two positive whole numbers such as [128, 128]"
        )
    return (
        _at_most(reader, f"{name}[0]", block[0], MOST_SIZE),
        _at_most(reader, f"{name}[1]", block[1], MOST_SIZE),
    )


def unconverted_modules(raw: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Return ``quantization_config.modules_to_not_convert`` of a raw ``config.json``; absent or null is empty.

    Raises:
        ConfigError: it is no list of names; the message begins with ``prefix``.
    """
    quant = raw.get("quantization_config") if isinstance(raw, Mapping) else None
    listed = quant.get("modules_to_not_convert") if isinstance(quant, Mapping) else None
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple):
        raise ConfigError(
            f"{prefix}quantization_config.modules_to_not_convert is {shown(listed)}, expected a list of module names"
        )
    for item in listed:
        if not isinstance(item, str):
            raise ConfigError(
                f"{prefix}quantization_config.modules_to_not_convert holds {shown(item)}, expected module names alone"
            )
    return tuple(listed)


def _unconverted(reader: _Reader) -> tuple[str, ...]:
    """Entries of ``modules_to_not_convert``, each once; transformers reads them as regular expressions, so they must be some."""
    entries = tuple(dict.fromkeys(unconverted_modules(reader.raw, f"{reader.source}: ")))
    key = "quantization_config.modules_to_not_convert"
    if len(entries) > MOST_ENTRIES:
        raise reader.fail(f"{key} has {len(entries)} entries, expected at most {MOST_ENTRIES}")
    for entry in entries:
        if (problem := _entry_problem(entry)) is not None:
            raise reader.fail(
                f"{key} holds {shown(entry)}, {problem}; write a module's name or a pattern such as 'model.layers.*.mlp'"
            )
    return entries


def _entry_problem(entry: str) -> str | None:
    """Why an entry is refused: what no regular expression is, and what a regular expression may search for without end."""
    if not 0 < len(entry) <= LONGEST_ENTRY:
        return f"which has {len(entry)} characters, expected 1 to {LONGEST_ENTRY}"
    try:
        re.compile(entry)
    except (re.error, OverflowError) as error:
        return f"which is no regular expression ({error})"
    if re.search(r"\)[*+{?]", entry) or len(re.findall(r"[*+{]|(?<!\()\?", entry)) > MOST_REPEATS:
        return f"which repeats a group or has more than {MOST_REPEATS} repetitions"
    return None


def _dtype(reader: _Reader) -> str:
    key = "dtype" if reader.has("dtype") else "torch_dtype"
    found = reader.raw[key] if reader.has(key) else "bfloat16"
    name = str(found).removeprefix("torch.")
    if name not in _DTYPES:
        raise reader.fail(f"{key} is {shown(found)}, expected one of {', '.join(_DTYPES)}")
    return name


def _check_sizes(reader: _Reader, fields: Mapping[str, Any]) -> None:
    experts = fields["n_routed_experts"]
    layers = fields["num_hidden_layers"] + fields["num_nextn_predict_layers"]
    tensors = 3 * experts * (layers - fields["first_k_dense_replace"])
    if tensors > MOST_TENSORS:
        raise reader.fail(
            f"num_hidden_layers {fields['num_hidden_layers']}, num_nextn_predict_layers {fields['num_nextn_predict_layers']} and "
            f"n_routed_experts {experts} make {tensors:,} tensors of experts, expected at most {MOST_TENSORS:,} (GLM-5.2: 58,368)"
        )
    _at_most(reader, "num_experts_per_tok", fields["num_experts_per_tok"], experts)
    _at_most(reader, "topk_group", fields["topk_group"], fields["n_group"])
    if experts % fields["n_group"]:
        raise reader.fail(
            f"n_group is {fields['n_group']}, which does not divide the {experts} experts"
        )
    per_group = experts // fields["n_group"]
    if fields["n_group"] > 1 and per_group < 2:
        raise reader.fail(
            f"n_group is {fields['n_group']}, which leaves {per_group} expert a group, expected at least 2: "
            "a group's score is the sum of its two best; lower n_group"
        )
    reachable = fields["topk_group"] * per_group
    if fields["num_experts_per_tok"] > reachable:
        raise reader.fail(
            f"num_experts_per_tok is {fields['num_experts_per_tok']}, but topk_group leaves {reachable} experts"
        )
    if fields["index_head_dim"] < fields["qk_rope_head_dim"]:
        raise reader.fail(
            f"index_head_dim is {fields['index_head_dim']}, expected at least qk_rope_head_dim ({fields['qk_rope_head_dim']})"
        )
    heads = reader.raw.get("num_key_value_heads")
    if heads is not None and heads != fields["num_attention_heads"]:
        raise reader.fail(
            f"num_key_value_heads is {shown(heads)}, but latent attention has one per head: {fields['num_attention_heads']}"
        )
    for key in _OTHER_EXPERTS:
        other = reader.raw.get(key)
        if other is not None and other != experts:
            log.warning(
                "%s: %s is %s; n_routed_experts (%d) is used",
                reader.source,
                key,
                shown(other),
                experts,
            )
