"""The adapter configuration: what is adapted, at which rank, and which of it trains.

The one idea: targets say what is adapted, the scope says what of it trains. XoRL's spellings are
accepted as aliases, so that a configuration moves over; its switches that have one meaning here
(``ep_dispatch: alltoall``) are accepted at that value and refused, with the reason, at any other.
Refused: unknown keys, a missing ``alpha`` (a scale of zero trains nothing, silently), a rank that no
projection can use, one setting under two spellings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ValidationError, model_validator

from megatron_xorl.config.regions import REGIONS, SCOPES
from megatron_xorl.config.strict import (
    Flag,
    Number,
    NumberAsGiven,
    StrictModel,
    Text,
    did_you_mean,
    one_of,
    raise_config_error,
    show,
    whole,
)
from megatron_xorl.config.yaml import load_yaml
from megatron_xorl.errors import ConfigError, nearest

__all__ = ["ALIASES", "FOREIGN", "AdapterConfig", "TargetEntry", "load_adapter_config"]

ALIASES: dict[str, str] = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_export_format": "export_format",
    "use_rslora": "rslora",
    "scope": "glm52_lora_scope",
    "targets": "lora_target_modules",
}

# XoRL's switches with one meaning here: the values accepted, and why no other is.
FOREIGN: dict[str, tuple[tuple[object, ...], str]] = {
    "enable_lora": ((True,), "an adapter configuration always trains LoRA factors"),
    "enable_qlora": ((True,), "the base is always frozen"),
    "block_fp8_qlora_training": ((True,), "a block-FP8 base is used as it is in the file"),
    "quant_format": (
        ("block_fp8",),
        "the format is read from the checkpoint, and only block FP8 is supported",
    ),
    "quant_group_size": ((128,), "the block size is read from the checkpoint"),
    "moe_hybrid_shared_lora": ((True,), "expert banks share the factor on the hidden side"),
    "moe_implementation": (("triton",), "the expert kernel is chosen by the platform"),
    "ep_dispatch": (("alltoall",), "tokens travel to experts by Megatron's all-to-all dispatcher"),
    "freeze_router": ((True,), "the router never trains"),
    "merge_qkv": ((True, False), "latent attention has no fused query-key-value projection"),
    "merge_lora_interval": ((0, None), "factors are never merged into an FP8 base"),
    "qlora_exclude_modules": (([], None), "what is quantised is read from the checkpoint"),
    "unfuse_for_lora": (
        (False,),
        "factors are independent without unfusing, and an FP8 base cannot be unfused",
    ),
    "lora_target_manifest": (
        (None,),
        "write the entries as lora_target_modules: [{pattern, count, rank}]",
    ),
}


MOST_RANK = 2**14
"""A product B A has at most the rank of the smaller of its outer sizes, which is 6,144 at most in GLM-5.2."""


MOST_ALPHA = 1e9
"""Beyond it, and below its inverse, alpha / rank times a factor leaves what fp32 and bf16 hold with digits to spare."""


def _rank_number(value: object) -> int:
    number = whole(value)
    if not 1 <= number <= MOST_RANK:
        raise ValueError(
            f"found {show(number)}, expected at least 1 and at most {MOST_RANK}; usual ranks are 4 to 256"
        )
    return number


def _count_number(value: object) -> int:
    number = whole(value)
    if number < 1:
        raise ValueError(
            f"found {show(number)}, expected at least 1: an entry that matches nothing is an error, remove it"
        )
    return number


class TargetEntry(StrictModel):
    """A target with promises: ``pattern`` must match exactly ``count`` targets, which get ``rank`` instead of the region's."""

    pattern: Text
    count: Annotated[int, BeforeValidator(_count_number)] | None = None
    rank: Annotated[int, BeforeValidator(_rank_number)] | None = None


def _rank(value: object) -> int | dict[str, int]:
    if not isinstance(value, Mapping):
        return _rank_number(value)
    known = (*REGIONS, "default")
    ranks = {}
    for key, number in value.items():
        if key not in known:
            raise ValueError(
                f"unknown region {key!r}{did_you_mean(str(key), known)} (known: {', '.join(known)})"
            )
        try:
            ranks[key] = _rank_number(number)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    absent = [region for region in REGIONS if region not in value]
    if absent and "default" not in value:
        raise ValueError(f"no rank for {', '.join(absent)}; add them or a default")
    return ranks


def _targets(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return tuple(_entry(number, item) for number, item in enumerate(value, 1))
    fix = ""
    if isinstance(value, str):
        fix = (
            "; leave the key out to adapt every projection"
            if value in ("", "all", "all-linear")
            else f"; write [{value!r}]"
        )
    raise ValueError(f"found {show(value)}, expected a list of names or patterns{fix}")


def _entry(number: int, item: object) -> str | TargetEntry:
    if isinstance(item, TargetEntry) or (isinstance(item, str) and item):
        return item
    if not isinstance(item, Mapping):
        raise ValueError(
            f"found {show(item)} in the list (entry {number}), expected a name, a pattern in quotes, or {{pattern, count, rank}}"
        )
    try:
        try:
            return TargetEntry.model_validate(dict(item))
        except ValidationError as error:
            raise_config_error(TargetEntry, error)
    except ConfigError as error:
        raise ValueError(f"entry {number}, {show(item.get('pattern'))}: {error}") from None


_Exports = one_of(("sglang_shared_outer", "hf_peft", "hf_peft_fused"), {"peft": "hf_peft"})


class AdapterConfig(StrictModel):
    """An adapter configuration; every field is a key of the YAML file.

    ``rank``: one rank, or ``{region: rank, default: rank}``. ``alpha``: the factors are scaled by
    alpha / rank, with ``rslora`` by alpha / sqrt(rank). ``dropout``: of the adapter's input, 0 or
    more and less than 1. ``lora_target_modules``: names, patterns or :class:`TargetEntry`; None adapts
    every projection. ``frozen_factors``: ``keep`` builds the factors outside the scope (with B
    zero), ``drop`` does not. ``indexer``: ``frozen``, or ``kl`` with ``indexer_loss``.

    Raises:
        ConfigError: a key is unknown, missing, or has a value that is refused.
    """

    rank: Annotated[int | dict[str, int], BeforeValidator(_rank)]
    alpha: NumberAsGiven
    rslora: Flag = False
    dropout: Number = 0.0
    glm52_lora_scope: Annotated[str, one_of(SCOPES)] = "all"
    lora_target_modules: Annotated[
        tuple[str | TargetEntry, ...] | None, BeforeValidator(_targets)
    ] = None
    frozen_factors: Annotated[Literal["keep", "drop"], one_of(("keep", "drop"))] = "keep"
    indexer: Annotated[Literal["frozen", "kl"], one_of(("frozen", "kl"))] = "frozen"
    indexer_loss: Annotated[Literal["dense", "sparse"], one_of(("dense", "sparse"))] | None = None
    export_format: Annotated[str, _Exports] = "sglang_shared_outer"
    allow_nonzero_frozen: Flag = False

    def __init__(self, **values: Any) -> None:
        given = _canonical(values)
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise_config_error(AdapterConfig, error, (*ALIASES, *FOREIGN))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "adapter") -> AdapterConfig:
        """Build from a mapping as YAML gives it; messages begin with ``source``."""
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.alpha <= 0:
            raise ValueError(
                f"alpha is {self.alpha:g}, expected a positive number (at 0 the adapter does nothing); "
                "write for example alpha: 32"
            )
        if not 1 / MOST_ALPHA <= self.alpha <= MOST_ALPHA:
            raise ValueError(
                f"alpha is {self.alpha:g}, expected {1 / MOST_ALPHA:g} to {MOST_ALPHA:g}: the scale would be lost in fp32; "
                "write for example alpha: 32"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout:g}, expected 0 or more and less than 1")
        if self.indexer_loss is not None and self.indexer == "frozen":
            raise ValueError(
                "indexer_loss is set, but indexer is frozen; set indexer: kl or remove it"
            )
        return self

    def rank_for(self, region: str) -> int:
        """Return the rank of the factors of ``region`` (a manifest entry's own rank is not known here)."""
        if region not in REGIONS:
            raise ConfigError(
                f"no region {region!r}{did_you_mean(region, REGIONS)} (regions: {', '.join(REGIONS)})"
            )
        return (
            self.rank
            if isinstance(self.rank, int)
            else self.rank.get(region, self.rank.get("default", 0))
        )

    def scale_of(self, rank: int) -> float:
        """Return the number that multiplies B(A x) in a pair of factors of ``rank``.

        alpha / rank, or alpha / sqrt(rank) with ``rslora`` (Kalajdzievski 2023, arXiv:2312.03732).
        """
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def scale_for(self, region: str) -> float:
        """Return the scale of ``region`` (a manifest entry's own rank is not known here: :meth:`scale_of`)."""
        return self.scale_of(self.rank_for(region))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values from which :meth:`from_dict` builds an equal object."""
        document = self.model_dump(mode="json", exclude_none=True)
        if not self.rslora:
            # Written only where it is on, so that a checkpoint of before the key existed says the same.
            del document["rslora"]
        return document


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` under this package's own names; aliases renamed, XoRL's fixed switches checked and left out."""
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name in spelled:
            raise ConfigError(f"{key} and {spelled[name]} are the same setting ({name}); keep one")
        spelled[name] = key
        if name not in FOREIGN and name != "max_lora_rank":
            given[name] = value
    _check_foreign(values, given)
    if given.get("alpha") is None:
        raise ConfigError(
            f"alpha is missing{_instead(given, 'alpha')}; write it (for example alpha: 32): "
            "the factors are scaled by alpha / rank"
        )
    if given.get("rank") is None:
        raise ConfigError(
            f"rank is missing{_instead(given, 'rank')}; write it (for example rank: 16)"
        )
    return given


def _instead(given: Mapping[str, Any], name: str) -> str:
    """Name an unknown key that was probably meant, where there is one."""
    unknown = [str(key) for key in given if key not in AdapterConfig.model_fields]
    close = nearest(name, unknown, n=1)
    return f" (unknown key {close[0]!r} is not it)" if close else ""


def _check_foreign(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for key, (accepted, reason) in FOREIGN.items():
        if key in values and not any(
            values[key] == item and type(values[key]) is type(item) for item in accepted
        ):
            usable = " or ".join("null" if item is None else str(item).lower() for item in accepted)
            raise ConfigError(
                f"{key}: found {show(values[key])}, but only {usable} is accepted here: {reason}"
            )
    if "max_lora_rank" in values and values["max_lora_rank"] != given.get("rank"):
        raise ConfigError(
            f"max_lora_rank is {values['max_lora_rank']!r}, but rank is {given.get('rank')!r}; "
            "they must be equal, or leave it out"
        )


def load_adapter_config(path: str | Path) -> AdapterConfig:
    """Read an adapter configuration from a YAML file.

    Raises:
        ConfigError: the file is not readable YAML, or :class:`AdapterConfig` refuses it.
    """
    return AdapterConfig.from_dict(load_yaml(path), str(path))
