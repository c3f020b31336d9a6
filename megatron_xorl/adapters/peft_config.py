"""An ``adapter_config.json`` that this package did not write: PEFT's own, or XoRL's.

The one idea: tensors say what is adapted and at which rank; the file's configuration is asked for scales alone, and has to agree
about ranks. Everything in it that would change the product is refused by name, so that nothing is silently left out.

Refused: another method (DoRA, aLoRA, …), biases, saved modules, one alpha for some targets and another for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_xorl.adapters.formats import is_bank
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.adapters.patterns import pattern_value
from megatron_xorl.adapters.scopes import SCOPES
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError

__all__ = ["check_own_settings", "foreign_adapter"]

_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}

_SAYS_NOTHING = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version", "revision"),
    *("task_type", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
}  # fmt: skip
"""Keys that do not change what the tensors mean: which tensors exist, the tensors themselves say."""

_EXPECTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "_sglang_lora_format": ("shared_outer",),
    "moe_hybrid_shared_lora": (True,),
}


def foreign_adapter(
    document: Mapping[str, Any], factors: Sequence[Factor], format: str, source: str
) -> AdapterConfig:
    """Return the adapter configuration that describes a file without a ``megatron_xorl`` section.

    Args:
        document: ``adapter_config.json``.
        factors: what the file holds, from its tensors.
        format: of the file.
        source: name of the configuration file, for messages.

    Raises:
        AdapterError: a setting that is not understood, a rank that is not the tensors', or scales that one alpha cannot give.
    """
    _check_known(document, source)
    ranks = {factor.target: factor.rank for factor in factors}
    rslora = document.get("use_rslora") is True
    alphas: dict[str, float] = {}
    for target, rank in ranks.items():
        scale = _scale(document, target, rank, format, rslora, source)
        alphas[target] = scale * (math.sqrt(rank) if rslora else rank)
    first, alpha = next(iter(alphas.items()))
    for target, other in alphas.items():
        if not math.isclose(other, alpha, rel_tol=1e-9):
            raise AdapterError(
                f"{source} scales {first} with alpha {alpha:g} and {target} with alpha {other:g}; "
                "one alpha for all targets is supported: train with one, or scale lora_B of the others"
            )
    # Regions and targets are listed as found, so that the configuration builds exactly these factors.
    rank_by_target = [
        {"pattern": target, "rank": rank} if len(set(ranks.values())) > 1 else target
        for target, rank in ranks.items()
    ]
    given: dict[str, Any] = {
        "rank": max(ranks.values()),
        "alpha": _as_written(document, alpha),
        "glm52_lora_scope": _scope(factors),
        "lora_target_modules": rank_by_target,
    }
    return AdapterConfig(**given, rslora=rslora)


def check_own_settings(
    document: Mapping[str, Any],
    adapter: AdapterConfig,
    factors: Sequence[Factor],
    format: str,
    source: str,
) -> None:
    """Compare what other programs read of a file of this package with what its ``megatron_xorl`` section says.

    Raises:
        AdapterError: they would compute something else from it than this package.
    """
    _check_known({key: value for key, value in document.items() if key != "megatron_xorl"}, source)
    ranks = {factor.target: factor.rank for factor in factors}
    rank = max(ranks.values())
    found: dict[str, tuple[Any, Any]] = {
        "r": (document.get("r"), rank),
        "lora_alpha": (document.get("lora_alpha"), adapter.alpha),
        "use_rslora": (document.get("use_rslora", False), adapter.rslora),
    }
    if format == "sglang_shared_outer":
        others = {target: own for target, own in ranks.items() if own != rank}
        found["rank_pattern"] = (document.get("rank_pattern") or {}, others)
    for key, (told, own) in found.items():
        if told != own:
            shown = f"{own:g}" if isinstance(own, float) else str(own)
            raise AdapterError(
                f"{source}: {key} is {told!r}, its megatron_xorl section says {shown[:80]}; export the adapter again"
            )


def _as_written(document: Mapping[str, Any], alpha: float) -> int | float:
    """The file's own number where it is the one; a product of rounding otherwise (64.0 of 64, or of a doubled 128)."""
    given: int | float = document["lora_alpha"]
    if math.isclose(given, alpha, rel_tol=1e-9):
        return given
    return int(alpha) if isinstance(given, int) and alpha.is_integer() else round(alpha, 9)


def _check_known(document: Mapping[str, Any], source: str) -> None:
    for key, value in document.items():
        if key in _READ or key in _SAYS_NOTHING:
            continue
        if key in _EXPECTED:
            if not any(value is item or value == item for item in _EXPECTED[key]):
                raise AdapterError(
                    f"{source}: {key} is {value!r}, expected {_EXPECTED[key][0]!r}; the adapter means something else"
                )
        elif value not in (None, False, {}, []):
            raise AdapterError(
                f"{source}: {key} is {value!r}, which is not supported; only plain LoRA can be imported"
            )
    if document.get("peft_type") is None:
        raise AdapterError(f"{source} has no peft_type, expected 'LORA'; it is no adapter of PEFT")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(document.get(key) or {}, Mapping):
            raise AdapterError(
                f"{source}: {key} is {document[key]!r}, expected an object of patterns and numbers"
            )
    for key in ("r", "lora_alpha"):
        number = document.get(key)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e9:
            raise AdapterError(f"{source}: {key} is {number!r}, expected a positive number")


def _scale(
    document: Mapping[str, Any], target: str, rank: int, format: str, rslora: bool, source: str
) -> float:
    """Return what multiplies B(A x), as PEFT computes it."""
    name, expected = target, rank
    if format != "sglang_shared_outer" and is_bank(target) and not target.endswith("down_proj"):
        fused = f"{target.rpartition('.')[0]}.gate_up_proj"
        if pattern_value(document.get("rank_pattern"), fused, None) is not None:
            name, expected = fused, 2 * rank
    elif format != "sglang_shared_outer" and target.endswith(("gate_proj", "up_proj", "down_proj")):
        name = target if is_bank(target) else f"{target}.weight"
        if pattern_value(document.get("rank_pattern"), name, None) is None:
            name = target
    found = pattern_value(document.get("rank_pattern"), name, document["r"])
    alpha = pattern_value(document.get("alpha_pattern"), name, document["lora_alpha"])
    if found != expected:
        raise AdapterError(
            f"{source}: {name} has rank {found}, its tensors have {expected}; r and rank_pattern must be the tensors'"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise AdapterError(f"{source}: alpha of {name} is {alpha!r}, expected a positive number")
    return float(alpha / (math.sqrt(expected) if rslora else expected))


def _scope(factors: Sequence[Factor]) -> str:
    """Return the narrowest scope that trains every region of the file."""
    regions = {factor.region for factor in factors}
    fitting = [name for name, trained in SCOPES.items() if regions <= set(trained)]
    return min(fitting, key=lambda name: len(SCOPES[name]))
