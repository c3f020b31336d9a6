"""Megatron's arguments under adapters on a frozen FP8 base: supported, forced, refused, each with its reason.

One table, checked before anything is built, whichever script launched the run. Our own entry sets
what is forced; a foreign script is told what to pass. An argument that is not in the table is
Megatron's business.

:func:`model_arguments` writes a GLM config as the arguments that ``pretrain_gpt.py`` would take.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_xorl.config.layout import sequence_problem
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.config.stages import interleaving_problem, megatron_layout, pipeline_stages
from megatron_xorl.errors import ConfigError
from megatron_xorl.specs import model_fields
from megatron_xorl.training.recompute_arguments import recompute_faults

__all__ = [
    "RULES",
    "Rule",
    "check_arguments",
    "check_transformer_config",
    "forced_arguments",
    "model_arguments",
    "without_virtual_stages",
]


@dataclass(frozen=True)
class Rule:
    """One argument: its attribute name, the values that are allowed, and why.

    ``flags`` are what our entry passes to force it; ``kind`` is for the reader: ``forced`` has
    flags, ``refused`` has none.
    """

    name: str
    allowed: tuple[Any, ...]
    reason: str
    flags: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``forced`` or ``refused``."""
        return "forced" if self.flags else "refused"


_OFF = (False, None, 0)

RULES: tuple[Rule, ...] = (
    # Forced: our entry sets them, a foreign script must.
    Rule("calculate_per_token_loss", (True,), "the loss is the mean over the trained tokens of the global batch; Megatron's default "
         "changes the objective with the layout", ("--calculate-per-token-loss",)),
    Rule("use_distributed_optimizer", (True,), "adapter checkpoints read the distributed optimizer", ("--use-distributed-optimizer",)),
    Rule("optimizer", ("adam",), "adapter checkpoints hold Adam's moments", ("--optimizer", "adam")),
    Rule("gradient_accumulation_fusion", (False,), "a frozen base has no weight gradient to fuse", ("--no-gradient-accumulation-fusion",)),
    Rule("moe_router_bias_update_rate", _OFF, "the router's correction bias is part of the frozen base", ("--moe-router-bias-update-rate", "0")),
    Rule("moe_token_dispatcher_type", ("alltoall", "allgather"), "only these dispatchers are proven with adapters; flex needs DeepEP or HybridEP kernels",
         ("--moe-token-dispatcher-type", "alltoall")),
    Rule("untie_embeddings_and_output_weights", (True,), "GLM's head is not tied to the embedding", ("--untie-embeddings-and-output-weights",)),
    Rule("position_embedding_type", ("rope",), "rotary positions are applied inside the attention", ("--position-embedding-type", "rope")),
    Rule("make_vocab_size_divisible_by", (1,), "padding rows would take part in the softmax", ("--make-vocab-size-divisible-by", "1")),
    Rule("ckpt_format", ("torch_dist",), "adapter checkpoints are torch_dist", ("--ckpt-format", "torch_dist")),
    Rule("transformer_impl", ("local",), "the layers come from our spec", ("--transformer-impl", "local")),
    Rule("apply_rope_fusion", (False,), "rotary positions are applied inside the attention", ("--no-rope-fusion",)),
    # Refused: these change what a frozen base or an adapter gradient means, or are not proven.
    Rule("fp16", _OFF, "adapters train in bf16 or fp32; fp16 needs loss scaling that is not proven here"),
    Rule("fp8", _OFF, "the base's FP8 bytes are read by our own linears; Megatron's FP8 recipe would quantise activations on top"),
    Rule("fp4", _OFF, "the base is block FP8"),
    Rule("fp8_param_gather", _OFF, "it re-quantises parameters; the base is never re-quantised"),
    Rule("overlap_param_gather_with_optimizer_step", _OFF, "the gathering that starts inside the optimizer's step is not proven; "
         "overlap_param_gather starts it with the forward"),
    Rule("num_distributed_optimizer_instances", (1, None), "several optimizer instances are not proven with adapter checkpoints"),
    Rule("overlap_moe_expert_parallel_comm", _OFF, "its schedule calls the parts of a layer itself, past the index selection that layers share"),
    Rule("use_megatron_fsdp", _OFF, "FSDP would shard and cast the frozen bytes"),
    Rule("use_torch_fsdp2", _OFF, "FSDP would shard and cast the frozen bytes"),
    Rule("cuda_graph_impl", ("none", None), "CUDA graphs are not proven with index sharing"),
    Rule("enable_cuda_graph", _OFF, "CUDA graphs are not proven with index sharing"),
    Rule("external_cuda_graph", _OFF, "CUDA graphs are not proven with index sharing"),
    Rule("moe_shared_expert_overlap", _OFF, "the overlapped path bypasses the parallel state that adapters rely on"),
    Rule("moe_expert_capacity_factor", (None,), "dropping tokens changes the model that was trained"),
    Rule("moe_pad_expert_input_to_capacity", _OFF, "dropping tokens changes the model that was trained"),
    Rule("moe_router_enable_expert_bias", _OFF, "our router has the frozen correction bias; Megatron's own would be updated"),
    Rule("moe_permute_fusion", _OFF, "it needs Transformer Engine kernels that are not proven here"),
    Rule("mtp_num_layers", _OFF, "the MTP layer is carried through conversion and not trained"),
    Rule("hybrid_context_parallel", _OFF, "every context group holds whole rows, cut alike (layers.context)"),
    Rule("hierarchical_context_parallel_sizes", (None,), "keys are gathered over one context group (layers.context)"),
    Rule("cp_comm_type", (["p2p"], ["allgather"], "p2p", "allgather", None), "keys are gathered whatever it says; Megatron's default, p2p, and "
         "allgather are read as that"),
    Rule("tp_comm_overlap", _OFF, "it needs Transformer Engine linears"),
    Rule("use_precision_aware_optimizer", _OFF, "masters and moments are fp32"),
    Rule("optimizer_cpu_offload", _OFF, "the offloaded optimizer is not read by adapter checkpoints"),
    Rule("async_save", _OFF, "adapter checkpoints are saved synchronously"),
    Rule("no_save_optim", _OFF, "a checkpoint is complete or it is not saved"),
    Rule("no_save_rng", _OFF, "a checkpoint is complete or it is not saved"),
    Rule("no_load_optim", _OFF, "a resume is exact or refused; start from an adapter file instead"),
    Rule("no_load_rng", _OFF, "a resume is exact or refused; start from an adapter file instead"),
    Rule("finetune", _OFF, "a resume is exact or refused; start from an adapter file instead"),
    Rule("non_persistent_ckpt_type", (None,), "adapter checkpoints are small; save them persistently"),
    Rule("pretrained_checkpoint", (None,), "the base comes from the Hugging Face directory"),
)  # fmt: skip

# How the fields of the transformer config are spelled on Megatron's command line, where it is not --name-with-dashes.
_FLAGS = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "gated_linear_unit": "--swiglu",
}


def check_arguments(args: Namespace) -> None:
    """Check Megatron's arguments against :data:`RULES`.

    Raises:
        ConfigError: lists every argument that is set otherwise, with what was found, what is allowed and why.
    """
    faults = []
    for rule in RULES:
        value = getattr(args, rule.name, rule.allowed[0])
        if value not in rule.allowed:
            remedy = f"pass {' '.join(rule.flags)}" if rule.flags else "leave it out"
            faults.append(f"{rule.name} is {value!r}: {rule.reason}; {remedy}")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        faults.append(
            "sequence_parallel is off at tensor_model_parallel_size > 1: adapter gradients are summed over the tensor group "
            "only with it; pass --sequence-parallel"
        )
    sequence = sequence_problem(
        args.seq_length, tp=args.tensor_model_parallel_size, cp=args.context_parallel_size
    )
    faults += [sequence] if sequence else []
    faults += _interleaving_faults(args)
    faults += recompute_faults(args, args.num_layers)
    if faults:
        raise ConfigError(
            "these Megatron arguments cannot be used with adapters on a frozen base:\n  "
            + "\n  ".join(faults)
        )


def _interleaving_faults(args: Namespace) -> list[str]:
    """Why a step's microbatches cannot run through the virtual stages, where Megatron's usual group size is used."""
    virtual = getattr(args, "virtual_pipeline_model_parallel_size", None)
    pp = getattr(args, "pipeline_model_parallel_size", 1)
    if virtual is None or args.microbatch_group_size_per_vp_stage not in (None, pp):
        return []
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    problem = interleaving_problem(microbatches, pp, virtual)
    return [problem] if problem else []


def check_transformer_config(config: Any, glm: GlmConfig) -> None:
    """Check that a launch script's transformer config describes the model of the base's ``config.json``.

    Raises:
        ConfigError: lists every field that differs and the argument that sets it.
    """
    faults = []
    for name, expected in model_fields(glm).items():
        found = getattr(config, name, None)
        if found != expected:
            faults.append(
                f"{name} is {found!r}, the base's config.json says {expected!r}; pass {' '.join(_spell(name, expected))}"
            )
    if faults:
        raise ConfigError(
            "the launch arguments describe another model than the base:\n  " + "\n  ".join(faults)
        )


def forced_arguments() -> list[str]:
    """Flags that our entry adds to every run."""
    return [flag for rule in RULES for flag in rule.flags]


def model_arguments(glm: GlmConfig, given: Sequence[str] = ()) -> list[str]:
    """``pretrain_gpt.py``-style arguments that describe ``glm``.

    ``given`` are the user's own arguments: where they ask for several pipeline stages and do not say where to cut, the cut that
    ``config.stages`` proposes is added, since Megatron's even one would part layers from the selection that they share. With
    ``--num-virtual-stages-per-pipeline-rank`` it has so many stages a rank; Megatron reads their number from the cut and takes
    one of the two arguments, so the caller then passes :func:`without_virtual_stages`.

    Raises:
        LayoutError: they ask for more stages than there are layers that a stage can begin on.
    """
    arguments = [flag for name, value in model_fields(glm).items() for flag in _spell(name, value)]
    return [
        *arguments,
        *_pipeline_arguments(glm, given),
        "--kv-channels", str(glm.v_head_dim),
        "--qk-layernorm",
        "--rotary-scaling-factor", "1.0",
        "--max-position-embeddings", str(glm.max_position_embeddings),
        "--tokenizer-type", "NullTokenizer",
        "--vocab-size", str(glm.vocab_size),
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
    ]  # fmt: skip


# Arguments that say where the pipeline is cut.
_CUTS = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


def _pipeline_arguments(glm: GlmConfig, given: Sequence[str]) -> list[str]:
    pp, virtual = _stages_to_cut(given)
    if pp <= 1:
        return []
    return ["--pipeline-model-parallel-layout", megatron_layout(pipeline_stages(glm, pp, virtual))]


def _stages_to_cut(given: Sequence[str]) -> tuple[int, int]:
    """Pipeline ranks and virtual stages of each that we are to find a cut for; (1, 1) if none."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, dest="pp")
    parser.add_argument(_VIRTUAL, type=int, default=1, dest="virtual")
    try:
        asked = parser.parse_known_args(list(given))[0]
    except ArgumentError:
        return 1, 1  # not a number: Megatron's own parser says so
    if asked.pp <= 1 or asked.virtual < 1 or any(word.partition("=")[0] in _CUTS for word in given):
        return 1, 1
    return asked.pp, asked.virtual


def without_virtual_stages(given: Sequence[str]) -> list[str]:
    """Return ``given`` without ``--num-virtual-stages-per-pipeline-rank`` where :func:`model_arguments` put it into the cut."""
    if _stages_to_cut(given)[0] <= 1:
        return list(given)
    kept: list[str] = []
    words = iter(given)
    for word in words:
        name, equals, _ = word.partition("=")
        if name != _VIRTUAL:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _spell(name: str, value: Any) -> list[str]:
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    if name == "add_bias_linear":
        return [flag]
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, str(value).replace(" ", "")]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # --rotary-base is an int for Megatron
    return [flag, str(value)]
