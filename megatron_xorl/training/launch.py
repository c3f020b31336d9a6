"""What one launched run needs to know, and what it hangs into Megatron.

:func:`launch_for` is called by the spec function while Megatron builds the model, in our entry and in a foreign
``pretrain_gpt.py``-style script alike. It finds the base and the adapter config, checks the launch against them, and registers

* a pre-wrap hook that loads the base, attaches the adapters and freezes everything else before ``Float16Module`` and DDP;
* the adapter checkpoint behind Megatron's ``--save`` and ``--load``.

Sources, first found: the arguments ``--hf-model`` and ``--adapter-config`` (our entry adds them), then the environment variables
``MEGATRON_XORL_MODEL`` and ``MEGATRON_XORL_ADAPTER_CONFIG``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_args
from torch import nn

from megatron_xorl.adapters.available import check_available
from megatron_xorl.adapters.inventory import Inventory
from megatron_xorl.config.adapter import AdapterConfig, load_adapter_config
from megatron_xorl.config.layout import check_layout
from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.errors import CheckpointError, ConfigError
from megatron_xorl.layers.attach import check_gradients, check_trainability
from megatron_xorl.layers.context import use_split
from megatron_xorl.parallel.layout import current_layout
from megatron_xorl.training.arguments import check_arguments, check_transformer_config
from megatron_xorl.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_xorl.training.checkpoint_forms import FORMS
from megatron_xorl.training.forward_agreement import use_fp8_everywhere
from megatron_xorl.training.model import attach_adapters, prepare_model
from megatron_xorl.training.replicas import check_replicas
from megatron_xorl.training.resume import ANY_FORWARD, run_identity
from megatron_xorl.training.run_lock import hold_lock
from megatron_xorl.training.seams import Seams, install_seams
from megatron_xorl.weights.hashed_load import check_weight_hashes
from megatron_xorl.weights.opening import Checkpoint, open_checkpoint

__all__ = ["ADAPTER_VARIABLE", "MODEL_VARIABLE", "Launch", "launch_for"]

MODEL_VARIABLE = "MEGATRON_XORL_MODEL"
ADAPTER_VARIABLE = "MEGATRON_XORL_ADAPTER_CONFIG"

logger = logging.getLogger(__name__)


@dataclass
class Launch:
    """One run: the base, the adapters, and what its checkpoints must agree with."""

    model_dir: Path
    glm: GlmConfig
    adapter: AdapterConfig
    checkpoint: Checkpoint
    seed: int
    keep_last: int | None
    replica_interval: int = 0
    chunks: list[nn.Module] = field(default_factory=list)
    base_fingerprint: str = ""
    inventory: Inventory = field(default_factory=lambda: Inventory(()))
    unchecked: list[nn.Module] = field(default_factory=list)
    lock: IO[str] | None = None

    def prepare(self, models: list[nn.Module]) -> list[nn.Module]:
        """Pre-wrap hook: base, adapters, freeze, for every chunk of this pipeline stage."""
        args = get_args()
        if args.save and dist.get_rank() == 0:
            self.lock = hold_lock(Path(args.save))
        for model in models:
            prepare_model(model, self.glm, self.checkpoint)
            if getattr(args, "sft", False):
                # Megatron's own fine-tuning data is packed, and its get_batch cuts each document by itself.
                use_split(model, "documents")
            self.inventory = attach_adapters(model, self.adapter, seed=self.seed)
            self.base_fingerprint = model.base_fingerprint
            self.unchecked.append(model)
        self.chunks = models
        if dist.get_rank() == 0:
            logger.info(
                "scope %s: %d of %d factors train on this model",
                self.adapter.glm52_lora_scope, len(self.inventory.trainable), len(self.inventory.factors),
            )  # fmt: skip
        return models

    def check_iteration(self, *, iteration: int, **_iteration: Any) -> None:
        """After a step and before its checkpoint: what the first must have left behind; every N-th, whether copies agree."""
        self.check_first_iteration()
        if self.replica_interval and iteration % self.replica_interval == 0:
            check_replicas(self.chunks, f"after iteration {iteration}")

    def check_first_iteration(self, **_iteration: Any) -> None:
        """After the first step: what trains has a gradient buffer, what is frozen has no gradient and is still zero."""
        while self.unchecked:
            model = self.unchecked.pop()
            check_gradients(model)
            check_trainability(model, allow_nonzero_frozen=self.adapter.allow_nonzero_frozen)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint of this run must agree with (see ``training.checkpoint``)."""
        identity = run_identity(self.base_fingerprint, self.adapter, self.seed)
        return identity | {"layout": dataclasses.asdict(current_layout())}

    def save(
        self,
        iteration: int,
        models: list[nn.Module],
        optimizer: Any,
        scheduler: Any,
        flops: Any,
        *_: Any,
        **_megatron: Any,
    ) -> None:
        """Stands behind Megatron's ``save_checkpoint``."""
        args = get_args()
        common = self.identity() | {
            "scheduler": scheduler.state_dict(),
            "consumed_train_samples": args.consumed_train_samples,
            "floating_point_operations": float(flops),
            "seed": args.seed,
            "base_directory": str(self.model_dir.resolve()),
            "order": [factor.name for factor in self.inventory.trainable],
        }
        save_checkpoint(
            Path(args.save),
            iteration,
            unwrap_model(models),
            optimizer,
            common,
            keep_last=self.keep_last,
            keep_every=getattr(args, "keep_every", None),
            form=getattr(args, "ckpt_form", FORMS[0]),
        )

    def load(
        self, models: list[nn.Module], optimizer: Any, scheduler: Any, *_: Any, **_megatron: Any
    ) -> tuple[int, float]:
        """Stands behind Megatron's ``load_checkpoint``: returns iteration and floating-point operations so far."""
        args = get_args()
        expected = self.identity()
        if getattr(args, "allow_forward_change", False):
            expected |= {"forward": ANY_FORWARD}
        manifest = load_checkpoint(Path(args.load), unwrap_model(models), optimizer, expected)
        if manifest is None:
            if args.exit_on_missing_checkpoint:
                raise CheckpointError(
                    f"{args.load} has no checkpoint and --exit-on-missing-checkpoint is set"
                )
            if dist.get_rank() == 0:
                logger.warning("no checkpoint in %s: training starts at iteration 0", args.load)
            return 0, 0.0
        saved = manifest["scheduler"]
        if getattr(args, "override_lr", False):
            saved = saved | {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
        try:
            scheduler.load_state_dict(saved)
        except AssertionError as error:  # Megatron's comparison of schedules
            raise CheckpointError(
                f"the checkpoint in {args.load} was trained on another schedule ({error}); "
                "resume with the same schedule, or pass --override-lr (the rate) or --override-opt-param-scheduler (all)"
            ) from error
        args.consumed_train_samples = manifest["consumed_train_samples"]
        if dist.get_rank() == 0:
            logger.info("resumed from iteration %d in %s", manifest["iteration"], args.load)
        return manifest["iteration"], manifest["floating_point_operations"]


def launch_for(config: Any) -> Launch:
    """Find or make the launch of a Megatron model config, checked, hooks registered once.

    Raises:
        ConfigError: no base or adapter config was given, or the arguments do not fit.
        PlatformError: ranks would compute FP8 products on different backends or in different modes.
    """
    for hook in config.pre_wrap_hooks:
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Launch):
            return owner
    args = get_args()
    check_arguments(args)
    use_fp8_everywhere(
        backend=getattr(args, "fp8_backend", None), mode=getattr(args, "fp8_mode", None)
    )
    model_dir = _given(args, "hf_model", MODEL_VARIABLE, "a Hugging Face directory of the base")
    adapter = load_adapter_config(
        _given(args, "adapter_config", ADAPTER_VARIABLE, "an adapter YAML file")
    )
    check_available(adapter)
    glm = load_glm_config(model_dir)
    check_layout(glm, current_layout())
    check_transformer_config(config.transformer, glm)
    checkpoint = open_checkpoint(model_dir)
    check_weight_hashes(checkpoint.directory)
    launch = Launch(
        model_dir=model_dir,
        glm=glm,
        adapter=adapter,
        checkpoint=checkpoint,
        seed=args.seed,
        keep_last=getattr(args, "keep_last", None),
        replica_interval=getattr(args, "check_replicas", None) or 0,
    )
    config.pre_wrap_hooks.append(launch.prepare)
    install_seams(
        Seams(
            save_checkpoint=launch.save,
            load_checkpoint=launch.load,
            on_iteration=launch.check_iteration,
            keep_random_state=True,
        )
    )
    return launch


def _given(args: Namespace, name: str, variable: str, what: str) -> Path:
    value = getattr(args, name, None) or os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"no {name.replace('_', ' ')} was given; pass --{name.replace('_', '-')} or set {variable} to {what}"
        )
    return Path(value)
