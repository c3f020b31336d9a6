"""The library's door: build a GLM-5.2 Megatron model, load its base, attach adapters, run it.

    import torch, megatron_xorl as mx
    mx.use_cpu(); mx.initialize()
    model = mx.load_model("glm-tiny", dtype=torch.float32)
    mx.attach_adapters(model, mx.AdapterConfig(rank=8, alpha=16))
    logits = mx.forward_logits(model, input_ids)

The same functions serve ``megatron-xorl recall`` and the tests; training through Megatron's own loop uses the same parts through
the spec (``megatron_xorl.specs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.layout import check_layout, sequence_unit
from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.errors import ConfigError, DataError, LayoutError
from megatron_xorl.layers.attach import attach_inventory, check_trainability, freeze, named_factors
from megatron_xorl.layers.base import install_head, load_base
from megatron_xorl.layers.context import split_of
from megatron_xorl.layers.gathered import gather_before_use
from megatron_xorl.layers.token_keys import dropout_keys
from megatron_xorl.parallel.layout import current_layout
from megatron_xorl.specs import block_spec, transformer_config
from megatron_xorl.weights.fingerprint import fingerprint
from megatron_xorl.weights.hashed_load import check_weight_hashes
from megatron_xorl.weights.opening import Checkpoint, open_checkpoint

__all__ = [
    "DTYPE_NAMES",
    "attach_adapters",
    "build_model",
    "check_token_ids",
    "forward_logits",
    "load_chunks",
    "load_model",
    "prepare_model",
    "trainable_factors",
]

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def build_model(
    glm: GlmConfig,
    *,
    dtype: torch.dtype,
    max_sequence_length: int | None = None,
    vp_stage: int | None = None,
    config: MLATransformerConfig | None = None,
) -> GPTModel:
    """Build this rank's stage of the model, or one chunk of it, with empty base weights.

    Args:
        glm: the model.
        dtype: ``torch.float32`` or ``torch.bfloat16``.
        max_sequence_length: Megatron's bookkeeping value; the config's maximum by default.
        vp_stage: virtual stage, where ranks have several (see :func:`load_chunks`).
        config: one that chunks share; made here by default.

    Raises:
        LayoutError: the model cannot be cut into the active layout.
    """
    config = config or _checked_config(glm, dtype)
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config,
        block_spec(glm, config, vp_stage),
        vocab_size=glm.vocab_size,
        max_sequence_length=max_sequence_length or glm.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    install_head(model, glm)
    return model


def load_model(
    hf_dir: str | Path,
    adapters: AdapterConfig | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    hashes: bool | None = None,
) -> GPTModel:
    """Build the model of a Hugging Face directory on this rank and load its base, frozen.

    Where ranks have several virtual stages, use :func:`load_chunks`.

    Args:
        hf_dir: directory with ``config.json`` and safetensors shards, FP8 or BF16, or what ``megatron-xorl import`` made of one.
        adapters: attach these at once (see :func:`attach_adapters`).
        dtype: compute dtype; FP8 codes and scales keep the file's bytes either way.
        hashes: compare the hashes of the weights where there is a manifest, each file once a host; None: unless the
            environment says no (``weights.hashed_load``).

    Raises:
        ConfigError, WeightsError, LayoutError: what is wrong with the directory, or with the layout for it.
    """
    if (chunks := parallel_state.get_virtual_pipeline_model_parallel_world_size()) is not None:
        raise LayoutError(
            f"this rank has {chunks} virtual pipeline stages and load_model builds one; use load_chunks"
        )
    return load_chunks(hf_dir, adapters, dtype, hashes=hashes)[0]


def load_chunks(
    hf_dir: str | Path,
    adapters: AdapterConfig | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    hashes: bool | None = None,
    fields: Mapping[str, Any] | None = None,
) -> list[GPTModel]:
    """Build every virtual pipeline stage of this rank, in order, as :func:`load_model` builds the only one.

    The list is what Megatron's schedules, optimizer and ``training.checkpoint`` take. Chunks share one config.

    Args:
        hf_dir, adapters, dtype, hashes: see :func:`load_model`.
        fields: further fields of Megatron's transformer config, which ``training.arguments`` refuses or allows in a launched run.

    Raises:
        ConfigError, WeightsError, LayoutError: what is wrong with the directory, or with the layout for it.
    """
    glm = load_glm_config(hf_dir)
    config = _checked_config(glm, dtype, **(fields or {}))
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    models = [build_model(glm, dtype=dtype, vp_stage=stage, config=config) for stage in stages]
    checkpoint = open_checkpoint(hf_dir)
    check_weight_hashes(checkpoint.directory, hashes)
    for model in models:
        prepare_model(model, glm, checkpoint)
        if adapters is not None:
            attach_adapters(model, adapters)
    return models


def _checked_config(glm: GlmConfig, dtype: torch.dtype, **fields: Any) -> MLATransformerConfig:
    """Megatron's config of ``glm`` under the active layout, which must be one that it can be cut into."""
    if dtype not in DTYPE_NAMES:
        raise ConfigError(f"dtype is {dtype}; expected torch.float32 or torch.bfloat16")
    check_layout(glm, current_layout())
    return transformer_config(glm, dtype=dtype, **fields)


def prepare_model(model: nn.Module, glm: GlmConfig, checkpoint: Checkpoint) -> None:
    """Load the base from ``checkpoint`` into a built model and freeze it.

    Raises:
        ConfigError: the model was built for another vocabulary.
        WeightsError, LayoutError: what is wrong with the checkpoint, or with the layout for it.
    """
    if model.vocab_size != glm.vocab_size:
        raise ConfigError(
            f"the model was built with {model.vocab_size} vocabulary rows, the base has {glm.vocab_size}; "
            f"pass --vocab-size {glm.vocab_size} --make-vocab-size-divisible-by 1"
        )
    checkpoint.validate(glm)
    install_head(model, glm)
    load_base(model, checkpoint, glm)
    freeze(model)
    model.glm_config, model.base_directory = glm, checkpoint.directory
    model.base_fingerprint = _shared_fingerprint(glm, checkpoint)


def _shared_fingerprint(glm: GlmConfig, checkpoint: Checkpoint) -> str:
    """Fingerprint of the base, computed by rank 0 and told to the others."""
    box = [fingerprint(glm, checkpoint) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def attach_adapters(model: nn.Module, adapter: AdapterConfig, *, seed: int = 1234) -> Inventory:
    """Attach LoRA factors to a loaded model and return their inventory.

    The factors take the model's dtype; A is drawn from ``seed`` and the factor's logical name, B is zero.

    Raises:
        TargetError: an entry of the adapter's targets is wrong.
        AdapterError: the model already carries adapters.
    """
    glm = model.glm_config
    inventory = build_inventory(glm, adapter, dtype=DTYPE_NAMES[model.config.params_dtype])
    attach_inventory(model, glm, adapter, inventory, seed=seed)
    check_trainability(model)
    gather_before_use(model)
    model.adapter_config, model.inventory = adapter, inventory
    return inventory


def trainable_factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """``{logical factor name: parameter}`` of what trains on this rank."""
    return {
        name: parameter
        for name, (factor, _, parameter) in named_factors(model).items()
        if factor.trainable
    }


def forward_logits(
    model: nn.Module,
    input_ids: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    samples: Tensor | None = None,
    seed: int = 1234,
) -> Tensor | None:
    """Run the model and return its logits.

    Every rank of a tensor and context group passes the same whole rows and gets the whole logits; under context parallelism a
    rank's gradients are those of the tokens that it holds, whose sum over the data and context ranks is the whole.

    Args:
        model: from :func:`load_model`; the pipeline must have one stage.
        input_ids: int64 ``[b, s]``.
        cu_seqlens: int32 document bounds ``[documents + 1]`` when one row packs several documents (b = 1).
        samples: int64 ``[b]``, numbers of the rows in a training run: needed in training mode by adapters with a dropout
            (see :func:`~megatron_xorl.layers.token_keys.dropout_keys`), not read otherwise.
        seed: of the dropout.

    Returns:
        fp32 ``[b, s, vocab]``, the full vocabulary without padding.

    Raises:
        DataError, ConfigError: the ids are not this model's, or ``cu_seqlens`` are not bounds of documents in one row.
        AdapterError: a dropout needs ``samples``.
    """
    check_token_ids(model, input_ids)
    packed = None
    if cu_seqlens is not None:
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
    length = input_ids.shape[1]
    tp, cp = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    # The sequence is cut evenly (layers.context, sequence parallelism); a causal model does not see the tail.
    padded = torch.nn.functional.pad(input_ids, (0, -length % sequence_unit(tp=tp, cp=cp)))
    place = split_of(model).place(padded.shape[1], padded.device, packed)
    positions = torch.arange(padded.shape[1], device=padded.device).expand_as(padded)
    if place.slots is not None:
        padded, positions = padded[:, place.slots], positions[:, place.slots]
    keys = None if samples is None else dropout_keys(samples, positions, seed=seed)
    logits = model(padded, positions, keys, packed_seq_params=packed)
    if tp > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    logits = place.whole(logits.transpose(0, 1), partial_gradients=False).transpose(0, 1)
    return logits[:, :length, : model.glm_config.vocab_size].float()


def check_token_ids(model: nn.Module, input_ids: Tensor) -> None:
    """Return if ``input_ids`` are token ids that ``model`` can read.

    Raises:
        DataError: they are not int64 ``[b, s]`` with a token at least, or one is outside the vocabulary.
        ConfigError: a row is longer than ``max_position_embeddings``.
    """
    glm = model.glm_config
    if not isinstance(input_ids, Tensor):
        raise DataError(
            f"input_ids is a {type(input_ids).__name__}, expected an int64 tensor [batch, tokens]"
        )
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or input_ids.numel() == 0:
        raise DataError(
            f"input_ids is {input_ids.dtype} {list(input_ids.shape)}, expected int64 [batch, tokens] with at least one token"
        )
    least, most = int(input_ids.min()), int(input_ids.max())
    if least < 0 or most >= glm.vocab_size:
        raise DataError(
            f"input_ids holds tokens {least} to {most}, expected 0 to {glm.vocab_size - 1}"
        )
    if input_ids.shape[1] > glm.max_position_embeddings:
        raise ConfigError(
            f"{input_ids.shape[1]} tokens exceed max_position_embeddings ({glm.max_position_embeddings}); cut the rows"
        )
