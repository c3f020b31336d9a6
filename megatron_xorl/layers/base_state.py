"""Load the base from a Megatron distributed checkpoint through Megatron's own ``dist_checkpointing.load``.

The one idea: :func:`base_sharded_state_dict` describes every base tensor of this rank by key, place and a view of the memory that
the model holds it in, so that Megatron reads the rank's part of each global tensor straight into the model, at any layout. FP8
codes are described as float8, though modules hold them as uint8: a copy into uint8 would convert the values.

``.metadata`` and ``common.pt`` are read by allow-lists (``weights.dcp_metadata``, ``weights.archive``) before torch unpickles
them. Refused: what the checkpoint lacks, inf and NaN, and a cut that falls inside an FP8 block.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import WeightsError
from megatron_xorl.fp8.format import check_pair
from megatron_xorl.layers.base import megatron_modules
from megatron_xorl.layers.experts import BankLinear
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.weights.hashed_load import check_weight_hashes
from megatron_xorl.weights.keys import key_table
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint
from megatron_xorl.weights.names import SCALE_SUFFIX, TensorRow, hf_tensors
from megatron_xorl.weights.reader import refuse_nonfinite
from megatron_xorl.weights.slices import owned_range

__all__ = ["base_sharded_state_dict", "load_base_distributed"]

Offsets = list[tuple[int, int, int]]


class _Cut(NamedTuple):
    """Groups that a weight is cut by, and which copy of its part this rank holds."""

    rank: int
    world: int
    copies: int
    experts: tuple[int, int] | None


def base_sharded_state_dict(model: nn.Module, glm: GlmConfig) -> dict[str, ShardedTensor]:
    """Return every base tensor of one pipeline stage, by key of the checkpoint.

    The tensors are views of the model's own memory: what is loaded into them is in the model.

    Args:
        model: built by ``training.model.build_model``, base not loaded.
        glm: its configuration; decides which weights are FP8.

    Raises:
        LayoutError: this rank's cut falls inside an FP8 block.
    """
    modules = megatron_modules(model)
    grouped: dict[str, list[TensorRow]] = defaultdict(list)
    for row in hf_tensors(glm):
        first = row.expert in (None, 0)  # a bank is one key
        if first and row.megatron is not None and row.megatron.rpartition(".")[0] in modules:
            grouped[row.megatron].append(row)
    state: dict[str, ShardedTensor] = {}
    for name, rows in grouped.items():
        parent = modules[name.rpartition(".")[0]]
        for part, row in enumerate(rows):
            for key, data in _views(parent, name, row, part, len(rows), glm):
                state[key] = _sharded(key, data, row, _cut(parent, row, glm))
    return state


def load_base_distributed(
    model: nn.Module, glm: GlmConfig, directory: Path | str, *, hashes: bool | None = None
) -> None:
    """Fill the base of one pipeline stage from a Megatron distributed checkpoint; collective.

    Args:
        model: built, its base not loaded.
        glm: its configuration.
        directory: of the checkpoint.
        hashes: of the weights, compared or not, see :func:`~megatron_xorl.weights.hashed_load.check_weight_hashes`.

    Raises:
        WeightsError: the checkpoint is unfinished, damaged, or of another model, or holds inf or NaN.
        FormatError: the codes and scales of an FP8 weight are no numbers.
        LayoutError: this rank's cut falls inside an FP8 block.
    """
    checkpoint = MegatronCheckpoint(directory)
    check_weight_hashes(checkpoint.directory, hashes)
    checkpoint.validate(glm)
    state = base_sharded_state_dict(model, glm)
    for key, sharded in state.items():
        sharded.key = checkpoint.spelling(key)
    loaded = dist_checkpointing.load(dict(state), str(directory))
    for key, sharded in state.items():
        target, value = sharded.data, loaded.get(key)
        if value is None:
            raise WeightsError(f"{directory} holds no {key}; import the checkpoint again")
        if value.data_ptr() != target.data_ptr():
            with torch.no_grad():
                target.copy_(value)
    _refuse_nonfinite(state, glm)


def _refuse_nonfinite(state: dict[str, ShardedTensor], glm: GlmConfig) -> None:
    """Check that what was loaded are numbers, by the rules that direct loading has."""
    for key, sharded in state.items():
        scales = state.get(key + SCALE_SUFFIX)
        if scales is not None:
            assert glm.weight_block_size is not None
            check_pair(key, sharded.data, scales.data, glm.weight_block_size)
        elif not key.endswith(SCALE_SUFFIX):
            refuse_nonfinite(key, sharded.data)


def _views(
    parent: nn.Module, name: str, row: TensorRow, part: int, parts: int, glm: GlmConfig
) -> list[tuple[str, Tensor]]:
    """Key and memory of one part of a weight, and of its scales."""
    table = key_table(glm)
    key = table[row.hf].key
    if not isinstance(parent, AdapterHost):
        return [(key, getattr(parent, name.rpartition(".")[2]).detach())]
    base = parent.base
    if base.codes is None or base.scales is None:
        assert base.dense is not None
        return [(key, _part(base.dense, part, parts))]
    assert row.scale_name is not None
    codes = base.codes.view(torch.float8_e4m3fn)
    return [
        (key, _part(codes, part, parts)),
        (table[row.scale_name].key, _part(base.scales, part, parts)),
    ]


def _part(whole: Tensor, part: int, parts: int) -> Tensor:
    rows = whole.shape[-2] // parts
    return whole.narrow(-2, part * rows, rows)


def _cut(parent: nn.Module, row: TensorRow, glm: GlmConfig) -> _Cut:
    if isinstance(parent, BankLinear):
        group = parallel_state.get_expert_tensor_parallel_group()
        copies = parallel_state.get_expert_data_parallel_rank()
        experts = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        return _checked(row, _Cut(group.rank(), group.size(), copies, experts), glm)
    group = parallel_state.get_tensor_model_parallel_group()
    copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return _checked(row, _Cut(group.rank(), group.size(), copies, None), glm)


def _checked(row: TensorRow, cut: _Cut, glm: GlmConfig) -> _Cut:
    """Refuse a cut off the block grid, by the rule that direct loading has."""
    if row.tp_axis is not None:
        block = (
            glm.weight_block_size[row.tp_axis] if glm.weight_block_size and row.quantized else None
        )
        owned_range(row.hf, row.shape[row.tp_axis], cut.rank, cut.world, block=block)
    return cut


def _sharded(key: str, data: Tensor, row: TensorRow, cut: _Cut) -> ShardedTensor:
    offsets: Offsets = []
    if cut.experts is not None:
        offsets.append((0, *cut.experts))
    if row.tp_axis is not None:
        offsets.append((row.tp_axis + (cut.experts is not None), cut.rank, cut.world))
    inner = 0 if row.tp_axis is not None else cut.rank
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=(0, inner, cut.copies))
