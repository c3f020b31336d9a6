"""The named substitutions that let megatron-core 0.19.2 and megatron.training run on CPU and gloo.

Megatron has no CPU mode: it asks torch.cuda for its device, its streams and its random state, and writes "cuda" into its
code. Each entry of :data:`SUBSTITUTIONS` names the objects it replaces, why, and the first failure without it; a test
removes each in turn and sees that failure, so the table cannot grow stale in silence. Nothing here costs time per tensor
operation: functions are replaced where Megatron calls them, literals are exchanged in place.

Refuses to apply an entry whose object does not exist in the installed version (PlatformError).
"""

from __future__ import annotations

import functools
import queue
from dataclasses import dataclass
from typing import Literal

from megatron_xorl.parallel import appliers, standins, step_patches
from megatron_xorl.parallel.cpu_adam import CpuFusedAdam

__all__ = ["MEGATRON_VERSIONS", "SUBSTITUTIONS", "Substitution", "substitution_names"]

MEGATRON_VERSIONS = ("0.19.2", "0.20")
"""Lowest version the substitutions were seen to work with, and the first they are refused for."""

_CORE = "megatron.core"
_DIST_OPT = f"{_CORE}.optimizer.distrib_optimizer"
_RANDOM = f"{_CORE}.tensor_parallel.random"

_DEVICE = {"cuda": "cpu"}
_DEVICE_SITES_CORE = (
    f"{_CORE}.optimizer.clip_grads:get_grad_norm_fp32",
    f"{_CORE}.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    f"{_CORE}.optimizer.clip_grads:count_zeros_fp32",
    f"{_CORE}.optimizer.optimizer:MegatronOptimizer.has_grad_norm_group",
    f"{_CORE}.optimizer.optimizer:MixedPrecisionOptimizer.__init__",
    f"{_CORE}.optimizer.optimizer:FP32Optimizer.__init__",
    f"{_CORE}.pipeline_parallel.schedules:forward_backward_no_pipelining",
    f"{_CORE}.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    f"{_CORE}.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    f"{_CORE}.utils:local_multi_tensor_l2_norm",
    f"{_CORE}.transformer.utils:get_default_causal_mask",
    f"{_CORE}.tensor_parallel.data:_build_key_size_numel_dictionaries",
    f"{_CORE}.dist_checkpointing.exchange_utils:_get_empty_tensor_for_exchange",
    f"{_CORE}.dist_checkpointing.exchange_utils:exchange_loaded_tensors_gather_rounds",
    f"{_CORE}.dist_checkpointing.strategies.state_dict_saver:verify_global_md_reuse",
    f"{_CORE}.rerun_state_machine:RerunStateMachine._reduce_any",
)
_DEVICE_SITES_TRAINING = (
    "megatron.training.checkpointing:read_metadata",
    "megatron.training.dist_signal_handler:get_device",
    "megatron.training.initialize:_warmup_jit_function",
    "megatron.training.training:pretrain",
    "megatron.training.training:training_log",
    "megatron.training.training:checkpoint_and_decide_exit",
    "megatron.training.training:evaluate",
    "megatron.training.training:evaluate_and_print_results",
    "megatron.training.training:build_train_valid_test_data_loaders",
    "megatron.training.training:build_train_valid_test_data_iterators",
    "megatron.training.utils.common_utils:_compute_norm_2",
)
_TYPE_NAMES = {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}
_TYPE_SITES = (
    f"{_DIST_OPT}:DistributedOptimizer.__init__",
    f"{_DIST_OPT}:DistributedOptimizer._build_model_and_main_param_groups",
    f"{_CORE}.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    f"{_CORE}.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
)


@dataclass(frozen=True)
class Substitution:
    """One replacement: what it is called, what it replaces, why, and what fails first without it.

    ``replaces`` holds paths ``package.module:attribute.path``; ``needed_by`` is "core" for what a training step, a save or
    a load with megatron.core alone needs, "training" for what only megatron.training needs, "accelerated" for what is
    needed only where Transformer Engine or apex can be imported.
    """

    name: str
    replaces: tuple[str, ...]
    why: str
    first_failure: str
    needed_by: Literal["core", "training", "accelerated"]
    apply: appliers.Applier
    versions: tuple[str, str] = MEGATRON_VERSIONS


SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        "current_device",
        ("torch.cuda:current_device",),
        "Megatron allocates on torch.cuda.current_device(), at some 200 places",
        "tensor_parallel/layers.py and rotary_pos_embedding.py, building a model: 'Found no NVIDIA driver'",
        "core",
        appliers.bind(lambda: standins.CPU),
    ),
    Substitution(
        "rng",
        (
            "torch.cuda:get_rng_state",
            "torch.cuda.random:get_rng_state",
            "torch.cuda:set_rng_state",
            "torch.cuda:manual_seed",
            f"{_RANDOM}:_get_cuda_rng_state",
            f"{_RANDOM}:_set_cuda_rng_state",
        ),
        "the tensor-parallel random tracker swaps the GPU generator's state; here it swaps the CPU generator's",
        "tensor_parallel/random.py: 'Found no NVIDIA driver' when the tracker is seeded",
        "core",
        appliers.one_generator,
    ),
    Substitution(
        "stream",
        (
            "torch.cuda:Stream",
            "torch.cuda:Event",
            "torch.cuda:current_stream",
            "torch.cuda:stream",
        ),
        "token dispatch, DDP and checkpointing order their work with streams and events",
        "token_dispatcher.py, building a model: torch.cuda.Stream() fails in torch/cuda/streams.py",
        "core",
        appliers.bind_each(
            standins.CpuStream,
            standins.CpuEvent,
            lambda *_: standins.CpuStream(),
            standins.stream_context,
        ),
    ),
    Substitution(
        "synchronize",
        ("torch.cuda:synchronize", "torch.cuda:empty_cache"),
        "timers, pipeline sends and the checkpoint writer wait for the device",
        "filesystem_async.py preload_tensors, p2p_communication.py, timers.py: 'Found no NVIDIA driver'",
        "core",
        appliers.bind(lambda *_: None),
    ),
    Substitution(
        "device_literals",
        _DEVICE_SITES_CORE,
        "these functions allocate with device='cuda'",
        "optimizer.py, building an optimizer: torch.tensor(..., device='cuda')",
        "core",
        appliers.exchange(_DEVICE),
    ),
    Substitution(
        "tensor_type_literals",
        _TYPE_SITES,
        "the optimizers recognise parameters and gradients by type strings such as 'torch.cuda.FloatTensor'",
        "distrib_optimizer.py: TypeError, wrapped parameters must be one of torch.cuda.FloatTensor, ...",
        "core",
        appliers.exchange(_TYPE_NAMES),
    ),
    Substitution(
        "expert_split_sizes",
        (
            f"{_CORE}.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            f"{_CORE}.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        ),
        "a tensor already on the CPU is not made the numpy array that all_to_all_single needs as split sizes",
        "mappings.py: TypeError in all_to_all_single, with expert parallelism",
        "core",
        appliers.bind(appliers.tensor_to_cpu),
    ),
    Substitution(
        "unequal_parts",
        (f"{_CORE}.tensor_parallel.mappings:_gather_along_first_dim",),
        "the all-to-all dispatcher gathers as many tokens of an expert-tensor rank as were sent to it; gloo gathers equal parts",
        "mappings.py, with expert-tensor and expert parallelism: 'ProcessGroupGloo::allgather: invalid tensor size'",
        "core",
        appliers.with_unequal_parts,
    ),
    Substitution(
        "cp_positions",
        (
            f"{_CORE}.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
            f"{_CORE}.models.common.embeddings.rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
            f"{_CORE}.models.common.embeddings.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
        ),
        "the chunk index of context parallelism is made in pinned memory",
        "rope_utils.py, with context parallelism: 'Found no NVIDIA driver' from pin_memory=True",
        "core",
        appliers.bind(appliers.positions_on_this_cp_rank),
    ),
    Substitution(
        "adam",
        (
            f"{_CORE}.optimizer:Adam",
            f"{_CORE}.optimizer:USING_PYTORCH_OPTIMIZER",
            f"{_DIST_OPT}:Adam",
            f"{_DIST_OPT}:HAVE_APEX_OR_TE",
            f"{_DIST_OPT}:USING_APEX_OPTIMIZER",
            f"{_DIST_OPT}:USING_TE_OPTIMIZER",
        ),
        "Megatron's path for torch.optim.AdamW cannot resume; ours has FusedAdam's state, so it takes FusedAdam's path",
        "distrib_optimizer.py: assert len(steps) == 1 in state_dict() of a fresh optimizer; a wrong step after a load",
        "core",
        appliers.bind_each(CpuFusedAdam, False, CpuFusedAdam, True, True, False),
    ),
    Substitution(
        "optimizer_load",
        (f"{_DIST_OPT}:DistributedOptimizer.load_state_dict",),
        "it copies into views of fp32 parameters that require a gradient, outside no_grad",
        "distrib_optimizer.py: 'a view of a leaf Variable that requires grad is being used in an in-place operation'",
        "core",
        appliers.without_grad,
    ),
    Substitution(
        "per_group_steps",
        (
            f"{_DIST_OPT}:DistributedOptimizer.state_dict",
            f"{_DIST_OPT}:DistributedOptimizer.load_state_dict",
            f"{_CORE}.optimizer.optimizer:ChainedOptimizer._synchronize_steps",
        ),
        "factors that join later are at another Adam step, in parameter groups of their own; an expert-only scope has an empty "
        "sub-optimizer",
        "distrib_optimizer.py: assert len(steps) <= 1 in state_dict(); optimizer.py: a stub has no param_groups",
        "core",
        step_patches.per_group_steps,
    ),
    Substitution(
        "save_queue",
        (f"{_CORE}.dist_checkpointing.strategies.filesystem_async:_results_queue",),
        "a synchronous save hands its result to itself through a queue for which the first save spawns a server "
        "process that imports torch again (5 to 11 s, and it outlives a killed rank); a queue in this process serves",
        "filesystem_async.py: the spawned server, refused in a script that has no main guard (no asynchronous saves)",
        "core",
        appliers.bind(queue.Queue()),
    ),
    Substitution(
        "multi_tensor",
        (
            f"{_CORE}.optimizer.clip_grads:multi_tensor_applier",
            f"{_CORE}.optimizer.clip_grads:l2_norm_impl",
            f"{_CORE}.optimizer.clip_grads:multi_tensor_scale_impl",
            f"{_CORE}.optimizer.clip_grads:multi_tensor_scale_tensor_impl",
            f"{_CORE}.optimizer.optimizer:multi_tensor_applier",
            f"{_CORE}.optimizer.optimizer:multi_tensor_scale_impl",
            "megatron.training.utils.common_utils:multi_tensor_applier",
            "megatron.training.utils.common_utils:multi_tensor_l2norm",
        ),
        "where Transformer Engine or apex can be imported, norms and copies go to their CUDA kernels",
        "clip_grads.py: the kernel refuses CPU tensors (nothing fails where neither is installed)",
        "accelerated",
        appliers.local_multi_tensor,
    ),
    Substitution(
        "tensor_cuda",
        ("torch:Tensor.cuda",),
        "models and batches are moved with .cuda()",
        "models/dist_utils.py, and every get_batch: 'Invalid device, must be cuda device'",
        "training",
        appliers.bind(standins.tensor_cuda),
    ),
    Substitution(
        "training_device_literals",
        _DEVICE_SITES_TRAINING,
        "these functions of megatron.training allocate with device='cuda'",
        "training/initialize.py _warmup_jit_function, then pretrain: torch.tensor(..., device='cuda')",
        "training",
        appliers.exchange(_DEVICE),
    ),
    Substitution(
        "device_count",
        ("torch.cuda:device_count", "torch.cuda:set_device"),
        "megatron.training initialises its process groups only if it counts a device",
        "parallel_state.py: 'pipeline_model parallel group is not initialized'",
        "training",
        appliers.bind_each(functools.cache(lambda: 1), lambda *_: None),
    ),
    Substitution(
        "device_arch",
        (
            "megatron.training.utils.common_utils:get_device_arch_version",
            "megatron.training.utils:get_device_arch_version",
            "megatron.training.arguments:get_device_arch_version",
        ),
        "the argument check asks for the GPU's generation to demand CUDA_DEVICE_MAX_CONNECTIONS before the tenth; "
        "a CPU needs none",
        "common_utils.py get_device_arch_version, with TP > 1",
        "training",
        appliers.bind(lambda: 10),
    ),
    Substitution(
        "allow_no_cuda",
        ("megatron.training.initialize:initialize_megatron",),
        "its allow_no_cuda switch exists, but pretrain() does not pass it",
        "initialize.py: 'Megatron requires CUDA.'",
        "training",
        appliers.default_true,
    ),
    Substitution(
        "prebuilt_helpers",
        (f"{_CORE}.datasets.utils:compile_helpers",),
        "the wheel ships the compiled dataset helpers but no Makefile; compile_helpers runs make and exits",
        "datasets/utils.py: SystemExit after 'make: *** No targets'",
        "training",
        appliers.bind(lambda: None),
    ),
    Substitution(
        "jit_fuser",
        (f"{_CORE}.jit:jit_fuser",),
        "Megatron compiles some 40 small functions with torch.compile, which on a CPU calls a C++ compiler for each "
        "(15 s at the first step, and an error where none is installed); their plain versions are used",
        "torch._inductor, at the first forward: InvalidCxxCompiler where there is no C++ compiler",
        "core",
        appliers.without_jit_fuser,
    ),
)


def substitution_names() -> tuple[str, ...]:
    """Return the names in the order they are applied."""
    return tuple(entry.name for entry in SUBSTITUTIONS)
