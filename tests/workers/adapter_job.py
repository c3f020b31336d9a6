"""Training jobs in a library user's own loop: Megatron's DDP, optimizer and scheduler around our adapters.

``Job`` trains the tiny model. ``Job(base=False)`` holds the factors alone, without a base: the checkpoint cannot tell the
difference, and building it takes no time.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEQ, BATCH = 48, 2
ADAPTER = {"rank": 2, "alpha": 4}
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Job:
    """One rank's model, optimizer and scheduler, expert-parallel over the whole world unless a layout is given."""

    def __init__(
        self,
        model_dir: Path,
        adapter: dict[str, Any] | None = None,
        *,
        base: bool = True,
        bf16: bool = False,
        fingerprint: str = "base",
        layout: dict[str, int] | None = None,
    ) -> None:
        from megatron_xorl.config.adapter import AdapterConfig
        from megatron_xorl.parallel.cpu import use_cpu
        from megatron_xorl.parallel.groups import initialize

        use_cpu()
        self.layout = {"ep": dist.get_world_size()} if layout is None else layout
        initialize(**self.layout)
        self.adapter = AdapterConfig(**(ADAPTER if adapter is None else adapter))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.model = self._load(model_dir) if base else self._factors_only(model_dir)
        self.fingerprint = self.model.base_fingerprint if base else fingerprint
        self.chunk, self.optimizer = _wrap(self.model, bf16)
        self.scheduler = _scheduler(self.optimizer)

    def _load(self, model_dir: Path) -> torch.nn.Module:
        from megatron_xorl.training.model import load_model

        return load_model(model_dir, self.adapter, dtype=self.dtype)

    def _factors_only(self, model_dir: Path) -> torch.nn.Module:
        from megatron_xorl.adapters.inventory import build_inventory
        from megatron_xorl.config.model import load_glm_config
        from megatron_xorl.layers.attach import _owned
        from megatron_xorl.layers.lora import LoraPair
        from megatron_xorl.parallel.ownership import mark_ownership
        from megatron_xorl.specs import transformer_config

        glm = load_glm_config(model_dir)
        dtype = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        inventory = build_inventory(glm, self.adapter, dtype=dtype)
        model = torch.nn.Module()
        model.config, model.inventory = transformer_config(glm, dtype=self.dtype), inventory
        model.pairs = torch.nn.ModuleList()
        for target in inventory.targets:
            pieces = [_owned(inventory.by_name[f"{target}.lora_{side}"]) for side in "AB"]
            pair = LoraPair(*pieces, scale=1.0, dtype=self.dtype, device="cpu", seed=1)
            for factor, _, parameter in pair.named_factors():
                parameter.requires_grad_(factor.trainable)
                mark_ownership(parameter, factor, tp=1, ep=self.layout.get("ep", 1), etp=1)
            model.pairs.append(pair)
        return model

    def common(self) -> dict[str, Any]:
        """Return what the launch would put into the manifest."""
        from megatron_xorl.parallel.layout import current_layout
        from megatron_xorl.training.resume import run_identity

        return run_identity(self.fingerprint, self.adapter, 1234) | {
            "layout": asdict(current_layout()),
            "scheduler": self.scheduler.state_dict(),
            "order": [factor.name for factor in self.model.inventory.trainable],
            "base_directory": "base",
        }

    def save(self, root: Path, iteration: int, **options: Any) -> Path:
        """Save through the product."""
        from megatron_xorl.training.checkpoint import save_checkpoint

        return save_checkpoint(
            root, iteration, [self.model], self.optimizer, self.common(), **options
        )

    def load(self, root: Path) -> int | None:
        """Load through the product; return the iteration."""
        from megatron_xorl.training.checkpoint import load_checkpoint

        manifest = load_checkpoint(root, [self.model], self.optimizer, self.common())
        if manifest is None:
            return None
        self.scheduler = _scheduler(
            self.optimizer
        )  # loading adds to what a scheduler has already counted
        self.scheduler.load_state_dict(manifest["scheduler"])
        return manifest["iteration"]

    def step(self, number: int) -> dict[str, Any]:
        """Train on global samples ``2 * number`` and ``2 * number + 1``; return loss, gradient norm and learning rate."""
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        world, rank = dist.get_world_size(), dist.get_rank()
        samples = [BATCH * number + rank + world * i for i in range(BATCH // world)]
        outputs = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(map(tokens_of, samples)),
            model=[self.chunk],
            num_microbatches=len(samples),
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = self.optimizer.step()
        assert updated
        total = torch.stack([output["loss"] for output in outputs]).sum(0)
        dist.all_reduce(total)
        rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=BATCH)
        # A draw a step: a run that resumes with other random state is seen.
        return {
            "loss": (total[0] / total[1]).item(),
            "norm": float(norm),
            "lr": rate,
            "draw": torch.rand(1).item(),
        }

    def state(self) -> dict[str, str]:
        """Return ``{what: hash of its bytes}`` of everything this rank trains with, read from Megatron's own objects."""
        from megatron_xorl.layers.attach import named_factors
        from megatron_xorl.training.rng import get_rng_state

        found = {
            name: digest(parameter) for name, (_, _, parameter) in named_factors(self.model).items()
        }
        for place, (main, moments) in enumerate(self.optimizer_tensors()):
            found[f"main {place}"] = digest(main)
            for kind in ("exp_avg", "exp_avg_sq"):
                zero = torch.zeros_like(main)
                found[f"{kind} {place}"] = digest(moments.get(kind, zero))
        for number, group in enumerate(self.groups()):
            found[f"group {number}"] = f"step {group.get('step', 0)} lr {group['lr']}"
        found |= {f"rng {kind}": digest(value) for kind, value in get_rng_state().items()}
        return found | {"scheduler": repr(sorted(self.scheduler.state_dict().items()))}

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of every torch optimizer inside Megatron's."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [group for part in parts for group in part.optimizer.param_groups]

    def optimizer_tensors(self) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return ``(master piece, its moments)`` in the optimizer's own order."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [
            (main, part.optimizer.state.get(main, {}))
            for part in parts
            for group in part.optimizer.param_groups
            for main in group["params"]
        ]

    def fill(self, seed: int) -> None:
        """Give factors, masters and moments values that depend on their logical name alone, and step 3.

        A factor is its master, rounded: of fp32 factors Megatron's masters are views.
        """
        from megatron_xorl.layers.attach import named_factors
        from megatron_xorl.training.checkpoint import _trainable
        from megatron_xorl.training.optimizer_state import scatter_state

        state: dict[str, dict[str, torch.Tensor]] = {}
        with torch.no_grad():
            for name, (factor, piece, parameter) in named_factors(self.model).items():
                if factor.trainable:
                    parameter.copy_(piece.of(drawn(seed, "master", factor)))
                    state[name] = {
                        kind: piece.of(drawn(seed, kind, factor)).contiguous() for kind in KINDS
                    }
        steps = dict.fromkeys(state, 3)
        scatter_state(self.optimizer, _trainable([self.model]), state, steps)


def drawn(seed: int, kind: str, factor: Any) -> torch.Tensor:
    """Return the fp32 values of one kind of state of a factor, in its full logical shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {kind} {factor.name}".encode()))
    values = torch.randn(factor.shape, generator=generator)
    return values.abs() if kind == "exp_avg_sq" else values


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    plain = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:16]


def tokens_of(sample: int) -> torch.Tensor:
    """Return the tokens of a global sample ``[1, SEQ + 1]``; the first ``3 + sample mod 5`` of 8 are trained."""
    generator = torch.Generator().manual_seed(sample % 4)
    return torch.randint(0, 256, (1, SEQ + 1), generator=generator)


def _forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(iterator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    mask = (torch.arange(SEQ) % 8 < 3 + tokens[0, 0] % 5).float()[None]
    output = model(inputs, torch.arange(SEQ)[None], None, labels=labels)

    def reduce(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, count = (losses.float() * mask).sum(), mask.sum().int()
        return loss, count, {"loss": torch.stack([loss.detach(), count.float()])}

    return output, reduce


def _wrap(model: torch.nn.Module, bf16: bool) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    inner = Float16Module(model.config, model) if bf16 else model
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunk = DistributedDataParallel(model.config, ddp, inner)
    settings = OptimizerConfig(
        lr=1e-2,
        min_lr=1e-4,
        weight_decay=0.01,
        clip_grad=1.0,
        adam_beta2=0.95,
        bf16=bf16,
        use_distributed_optimizer=True,
    )
    return chunk, get_megatron_optimizer(settings, [chunk])


def _scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=1e-3,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=4,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )
