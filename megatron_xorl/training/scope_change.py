"""A resume whose scope is not the checkpoint's: what keeps its state, what joins, what may be left out.

The one idea: a factor that trained has a value that the model computes with, whether it goes on training or not. So

* a factor that trained and trains: value and Adam state from the file;
* one that joins (a wider scope): its own initial value, or the file's if it is carried there; zero state, step 0;
* one that trained and is frozen now (a narrower scope): its value from the file. While its B is zero it contributes nothing and
  is left; otherwise that is refused, unless ``allow_nonzero_frozen`` is set: then it goes on contributing and is carried in every
  checkpoint, under ``frozen`` in the manifest.

Refused too: a factor that differs in shape or dtype, or is missing although the scope did not change; dropping
(``frozen_factors: drop``) what contributes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_xorl.errors import CheckpointError
from megatron_xorl.layers.attach import lora_pairs, named_factors
from megatron_xorl.training.adapter_io import writes_slice
from megatron_xorl.training.checkpoint_forms import FORMS, read_whole

__all__ = ["ScopeChange", "carried_factors", "raise_first", "scope_change"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScopeChange:
    """Names of factors of the whole model, the same on every rank.

    ``valued``: their value comes from the file; ``kept``: their Adam state does too; ``joined``: they train and have zero state;
    ``training``: all that train.
    """

    valued: frozenset[str]
    kept: frozenset[str]
    joined: frozenset[str]
    training: frozenset[str]


def carried_factors(models: list[nn.Module]) -> dict[str, nn.Parameter | None]:
    """``{name: parameter, if this rank writes it}`` of what is frozen and contributes (B is not zero somewhere); collective."""
    mine = {
        factor.name
        for pair in lora_pairs(models)
        for factor, _, _ in pair.named_factors()
        if not factor.trainable and bool(pair.lora_B.detach().ne(0).any())
    }
    found = sorted(set().union(*_gathered(mine)))
    held = named_factors(models)
    return {
        name: held[name][2] if name in held and writes_slice(held[name][1]) else None
        for name in found
    }


def scope_change(
    directory: Path, manifest: dict[str, Any], models: list[nn.Module], adapter: dict[str, Any]
) -> ScopeChange:
    """Compare the factors of a checkpoint with those of this run; collective, changes nothing.

    Args:
        directory: of the checkpoint, verified.
        manifest: of the checkpoint.
        models: model chunks of this rank.
        adapter: this run's adapter document.

    Raises:
        CheckpointError: see the module; the same on every rank.
    """
    local = named_factors(models)
    trained, carried = manifest["factors"], manifest.get("frozen", {})
    in_file = trained | carried
    held = frozenset().union(*_gathered(set(local)))
    training = frozenset().union(*_gathered({n for n, (f, *_) in local.items() if f.trainable}))
    same_scope = manifest["adapter"].get("glm52_lora_scope") == adapter.get("glm52_lora_scope")
    faults = _misfits(local, in_file, may_join=not same_scope)
    raise_first(
        f"{directory} does not hold {len(faults)} of the factors that train here, first: {faults[0]}; "
        "resume with the same targets, scope and dtype"
        if faults
        else None
    )
    left_out = frozenset(in_file) - training
    _check_left_out(directory, manifest, left_out, held, adapter)
    joined = training - trained.keys()
    if dist.get_rank() == 0 and (joined or left_out - carried.keys()):
        logger.warning(
            "%s was trained with scope %s and goes on with %s: %d factors keep their state, %d join with zero Adam state at "
            "step 0, %d are frozen",
            directory, manifest["adapter"].get("glm52_lora_scope"), adapter.get("glm52_lora_scope"),
            len(training) - len(joined), len(joined), len(left_out),
        )  # fmt: skip
    return ScopeChange(
        valued=held & in_file.keys(),
        kept=training & trained.keys(),
        joined=joined,
        training=training,
    )


def raise_first(fault: str | None) -> None:
    """Raise the first rank's fault on every rank; collective."""
    if found := [text for text in _gathered(fault) if text]:
        raise CheckpointError(found[0])


def _gathered(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _misfits(local: dict[str, Any], in_file: dict[str, Any], *, may_join: bool) -> list[str]:
    """Factors of this rank that the file describes otherwise: name, shape, dtype."""
    faults = []
    for name, (factor, *_) in local.items():
        saved = in_file.get(name)
        if saved is None:
            if factor.trainable and not may_join:
                faults.append(f"{name} is not in it")
        elif (tuple(saved["shape"]), saved["dtype"]) != (factor.shape, factor.dtype):
            faults.append(
                f"{name} is {saved['dtype']} {saved['shape']}, this run has {factor.dtype} {list(factor.shape)}"
            )
    return faults


def _check_left_out(
    directory: Path,
    manifest: dict[str, Any],
    left_out: frozenset[str],
    held: frozenset[str],
    adapter: dict[str, Any],
) -> None:
    """Ranks share the reading of B of what trains no more."""
    described = manifest["factors"] | manifest.get("frozen", {})
    share = sorted(name for name in left_out if name.endswith(".lora_B"))
    mine = share[dist.get_rank() :: dist.get_world_size()]
    nonzero = [name for name in mine if _contributes(directory, manifest, name, described[name])]
    found = sorted(name for part in _gathered(nonzero) for name in part)
    if not found:
        return
    scopes = f"{manifest['adapter'].get('glm52_lora_scope')} and this run has {adapter.get('glm52_lora_scope')}"
    if not adapter.get("allow_nonzero_frozen"):
        raise CheckpointError(
            f"{directory} was trained with adapter.glm52_lora_scope {scopes}: {len(found)} factors would be frozen that are not "
            f"zero, first {found[0]}; set allow_nonzero_frozen: true to keep them contributing, or resume with the same scope"
        )
    if lost := [name for name in found if name not in held]:
        raise CheckpointError(
            f"{directory} was trained with adapter.glm52_lora_scope {scopes}: {len(lost)} factors that are not zero would be "
            f"dropped, first {lost[0]}; set frozen_factors: keep"
        )


def _contributes(
    directory: Path, manifest: dict[str, Any], name: str, described: dict[str, Any]
) -> bool:
    form, dtype = manifest.get("form", FORMS[0]), getattr(torch, described["dtype"])
    value = read_whole(form, directory, f"lora/{name}", tuple(described["shape"]), dtype)
    return bool(value.ne(0).any())
