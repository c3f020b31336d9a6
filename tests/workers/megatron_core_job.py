"""A small, stock Megatron-core job: an MoE GPT, DDP, the distributed optimizer, one step, a save and a load.

It knows nothing of GLM-5.2: whatever it needs from the CPU platform, every Megatron user needs.
"""

from __future__ import annotations

import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCAB, SEQ, MICRO = 64, 16, 2


def train_save_load(
    skip: frozenset[str], *, bf16: bool = False, pp: int = 1, steps: int = 2
) -> dict[str, Any]:
    """Train ``steps`` steps, save, load into a fresh model, train one more step in both; return the losses."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu(skip=skip)
    initialize(ep=1 if pp > 1 else dist.get_world_size(), pp=pp)
    model, optimizer = build(bf16)
    losses = [step(model, optimizer, number) for number in range(steps)]
    folder = shared_folder()
    save(model, optimizer, folder)
    after_save = step(model, optimizer, steps)
    fresh_model, fresh_optimizer = build(bf16)
    load(fresh_model, fresh_optimizer, folder)
    after_load = step(fresh_model, fresh_optimizer, steps)
    return {"losses": losses, "after_save": after_save, "after_load": after_load}


def build(bf16: bool) -> tuple[Any, Any]:
    """Return a DDP-wrapped MoE GPT and its distributed optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=32,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        add_bias_linear=False,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(7)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    if bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, model)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2, weight_decay=0.01, bf16=bf16, use_distributed_optimizer=True, clip_grad=1.0
        ),
        [model],
    )
    return model, optimizer


def first_losses(batch_sets: int) -> list[float]:
    """Return the losses of untrained weights on the data of ranks 0..batch_sets-1 (1: on this rank's, summed)."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(ep=dist.get_world_size())
    losses = []
    for offset in range(batch_sets):
        model, optimizer = build(bf16=False)
        fill_by_name(model)
        losses.append(step(model, optimizer, 0, data_rank=dist.get_rank() + offset))
    return losses


def fill_by_name(model: Any) -> None:
    """Give every matrix values that depend on its global name alone, so that every layout holds the same model."""
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_model_parallel_rank()
    local = 4 // parallel_state.get_expert_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        globally = re.sub(
            r"local_experts\.(\d+)", lambda found: f"expert.{int(found[1]) + rank * local}", name
        )
        if parameter.dim() == 2:
            generator = torch.Generator().manual_seed(zlib.crc32(globally.encode()))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)


def step(model: Any, optimizer: Any, number: int, *, data_rank: int | None = None) -> float:
    """Run one training step of two microbatches; return the summed loss of all ranks, on every rank."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.module.config.finalize_model_grads_func = finalize_model_grads
    model.zero_grad_buffer()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(
        100 * number + (dist.get_rank() if data_rank is None else data_rank)
    )
    batches = [torch.randint(0, VOCAB, (MICRO, SEQ), generator=generator) for _ in range(2)]
    outputs = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=2,
        seq_length=SEQ,
        micro_batch_size=MICRO,
        forward_only=False,
    )
    updated, _, _ = optimizer.step()
    assert updated
    total = torch.tensor(float(sum(float(output["loss"]) for output in outputs)))
    dist.all_reduce(total)
    return total.item()


def _forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(iterator)
    positions = torch.arange(SEQ).expand_as(tokens)
    output = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
    return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def _state(model: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    module = model.module
    model_state = module.sharded_state_dict(metadata=metadata)
    return {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(
            model_state, is_loading=loading, metadata=metadata
        ),
    }


def save(model: Any, optimizer: Any, folder: str) -> None:
    """Save model and optimizer with dist_checkpointing."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(_state(model, optimizer, loading=False), folder)


def load(model: Any, optimizer: Any, folder: str) -> None:
    """Load what :func:`save` saved into a fresh model and optimizer."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(_state(model, optimizer, loading=True), folder)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def shared_folder() -> str:
    """Return one new folder that every rank of the world sees."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    Path(name[0]).mkdir(exist_ok=True)
    return name[0]
