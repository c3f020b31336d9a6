"""Put the checkpoint's bytes into a built model: each rank reads only the slices it owns.

One idea: every module of the model is asked for by its Megatron name in the name table, never discovered by shape. The loop runs
over the table's rows, so a tensor that no module takes, or a module that no row fills, is an error.

FP8 bytes go from the file into ``codes`` and ``scales`` unchanged. Whether a weight is FP8 is decided by the file (a scale
beside it), so a BF16 checkpoint loads into the same modules.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import WeightsError
from megatron_xorl.fp8.format import check_pair
from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.experts import BankLinear
from megatron_xorl.layers.head import Head, losses_through_the_head
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.linear import AdaptedLinear
from megatron_xorl.weights.names import TensorRow, hf_tensors
from megatron_xorl.weights.opening import Checkpoint
from megatron_xorl.weights.reader import refuse_nonfinite
from megatron_xorl.weights.slices import owned_range, scale_range

__all__ = ["install_head", "load_base", "megatron_modules"]


def megatron_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of one pipeline stage under their *global* Megatron names (``decoder.layers.{global layer}.…``)."""
    offsets: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            offsets[name] = f"decoder.layers.{module.layer_number - 1}"
    named: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        layer = ".".join(name.split(".")[:3])
        named[offsets[layer] + name[len(layer) :] if layer in offsets else name] = module
    return named


def install_head(model: nn.Module, glm: GlmConfig) -> None:
    """Replace Megatron's trainable ``output_layer`` by a frozen one that carries adapters and gives losses (last stage only)."""
    head = getattr(model, "output_layer", None)
    if head is None or isinstance(head, AdaptedLinear):
        return
    model.output_layer = Head(
        glm.hidden_size, model.vocab_size, config=model.config, block=None, tp_group=head.tp_group
    )
    losses_through_the_head(model)


def load_base(model: nn.Module, checkpoint: Checkpoint, glm: GlmConfig) -> None:
    """Fill every base weight of ``model`` (one pipeline stage) from ``checkpoint``.

    Raises:
        WeightsError: a tensor is missing or of another dtype, or a module of the model stayed empty.
        LayoutError: this rank's cut falls inside an FP8 block.
    """
    modules = megatron_modules(model)
    rows = _rows_of_stage(glm, modules)
    filled: set[str] = set()
    for name, group in rows.items():
        parent = modules[name.rpartition(".")[0]]
        if isinstance(parent, BankLinear):
            _fill_bank(parent, group, checkpoint, glm)
        elif isinstance(parent, AdaptedLinear):
            _fill_linear(parent, group, checkpoint, glm)
        else:
            _fill_tensor(getattr(parent, name.rpartition(".")[2]), group[0], checkpoint)
        filled.add(name)
    _refuse_unfilled(modules, filled)


def _rows_of_stage(glm: GlmConfig, modules: dict[str, nn.Module]) -> dict[str, list[TensorRow]]:
    """Table rows grouped by Megatron name, for the modules that this stage has."""
    grouped: dict[str, list[TensorRow]] = defaultdict(list)
    for row in hf_tensors(glm):
        if row.megatron is not None and row.megatron.rpartition(".")[0] in modules:
            grouped[row.megatron].append(row)
    return grouped


def _fill_linear(
    linear: AdaptedLinear, rows: list[TensorRow], checkpoint: Checkpoint, glm: GlmConfig
) -> None:
    pieces = [_read(row, checkpoint, glm, linear.tp_group) for row in rows]
    _set_weight(linear.base, _stack(pieces, rows, torch.cat), glm)


def _fill_bank(
    bank: BankLinear, rows: list[TensorRow], checkpoint: Checkpoint, glm: GlmConfig
) -> None:
    local = bank.base.shape[0]
    first = parallel_state.get_expert_model_parallel_rank() * local
    group = parallel_state.get_expert_tensor_parallel_group()
    experts = []
    for expert in range(first, first + local):
        own = [row for row in rows if row.expert == expert]
        experts.append(_stack([_read(row, checkpoint, glm, group) for row in own], own, torch.cat))
    _set_weight(bank.base, _stack(experts, rows, torch.stack), glm)


def _fill_tensor(target: Tensor, row: TensorRow, checkpoint: Checkpoint) -> None:
    part = None
    if row.tp_axis is not None:
        group = parallel_state.get_tensor_model_parallel_group()
        part = (owned_range(row.hf, row.shape[row.tp_axis], group.rank(), group.size()),)
    value = checkpoint.read(row.hf, part)
    refuse_nonfinite(row.hf, value)
    with torch.no_grad():
        target.copy_(value)


def _read(
    row: TensorRow, checkpoint: Checkpoint, glm: GlmConfig, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """This rank's slice of a weight and of its scales (``None`` when the file holds no scales beside it)."""
    scale_name = f"{row.hf}_scale_inv"
    quantized = scale_name in checkpoint
    block = glm.weight_block_size if quantized else None
    parts = [slice(0, size) for size in row.shape]
    if (axis := row.tp_axis) is not None:
        parts[axis] = owned_range(
            row.hf,
            row.shape[axis],
            group.rank(),
            group.size(),
            block=block[axis] if block else None,
        )
    codes = checkpoint.read(row.hf, tuple(parts))
    if not quantized:
        if codes.dtype == torch.float8_e4m3fn:
            raise WeightsError(
                f"{row.hf} is FP8 but {scale_name} is missing; an FP8 weight is meaningless without its scale"
            )
        refuse_nonfinite(row.hf, codes)
        return codes, None
    if block is None:
        raise WeightsError(
            f"{scale_name} is present but config.json has no quantization_config with weight_block_size"
        )
    scales = checkpoint.read(
        scale_name, tuple(scale_range(part, b) for part, b in zip(parts, block, strict=True))
    )
    check_pair(row.hf, codes, scales, block)
    return codes.view(torch.uint8), scales


def _stack(
    pieces: list[tuple[Tensor, Tensor | None]], rows: list[TensorRow], join: Any
) -> tuple[Tensor, Tensor | None]:
    kinds = {scales is None for _, scales in pieces}
    if len(kinds) > 1:
        names = ", ".join(row.hf for row in rows[:3])
        raise WeightsError(
            f"{names}: some are FP8 and some are not; projections fused in one Megatron weight must agree"
        )
    codes = join([codes for codes, _ in pieces])
    return codes, (None if kinds == {True} else join([scales for _, scales in pieces]))


def _set_weight(base: FrozenWeight, value: tuple[Tensor, Tensor | None], glm: GlmConfig) -> None:
    codes, scales = value
    device = next(base.buffers()).device
    if scales is None:
        base.set_dense(codes.to(device))
    else:
        assert glm.weight_block_size is not None
        base.set_quantized(codes.to(device), scales.to(device), glm.weight_block_size)


def _refuse_unfilled(modules: dict[str, nn.Module], filled: set[str]) -> None:
    """Every linear, parameter and persistent buffer must have come from the table."""
    missing = []
    for name, module in modules.items():
        if isinstance(module, AdapterHost):
            missing += [f"{name}.weight"] if f"{name}.weight" not in filled else []
        elif not isinstance(module, FrozenWeight):
            own = dict(module.named_parameters(recurse=False)) | dict(
                module.named_buffers(recurse=False)
            )
            missing += [f"{name}.{leaf}" for leaf in own if f"{name}.{leaf}" not in filled]
    if missing:
        raise WeightsError(
            f"these weights of the model have no tensor in the checkpoint's name table: {', '.join(missing)}"
        )
