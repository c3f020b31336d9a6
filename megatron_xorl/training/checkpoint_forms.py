"""The two spellings of an adapter checkpoint's tensors on disk, and how a rank writes and reads its part of them.

``torch_dist``: through Megatron's dist_checkpointing, keys ``lora/<factor>``, ``master/<factor>``, ``exp_avg/<factor>``,
``exp_avg_sq/<factor>``. ``dcp``: torch's distributed checkpoint alone, keys as its flattened optimizer form has them:
``model.<factor>``, ``optim.state.<factor>.exp_avg``, ``….exp_avg_sq``, ``….step``, ``….master_param``,
``optim.param_groups.<factor>.lr`` and so on, so that any user of torch's ``set_optimizer_state_dict`` reads it.

The one idea: both hold each factor once, under its logical name, in its full logical shape; a rank contributes a box of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["FORMS", "Box", "form_key", "read_boxes", "read_whole", "torch_groups", "write_boxes"]

FORMS = ("torch_dist", "dcp")

_STATE = {"master": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

_GROUP = {
    "amsgrad": False,
    "capturable": False,
    "decoupled_weight_decay": True,
    "differentiable": False,
    "foreach": None,
    "fused": None,
    "maximize": False,
}
"""What torch.optim.AdamW has in a parameter group beside lr, betas, eps and weight_decay: its defaults, which is how we step."""


@dataclass(frozen=True)
class Box:
    """The part of a full tensor that a rank holds.

    ``cuts``: ``(axis, place, places)`` for every axis that is cut evenly; none: all of it. Torch's checkpoint planner asks the
    two methods below, of its protocol for tensors that are spread over ranks.
    """

    data: Tensor
    cuts: tuple[tuple[int, int, int], ...] = ()

    @property
    def offsets(self) -> torch.Size:
        """Where the box begins in the full tensor."""
        starts = [0] * self.data.dim()
        for axis, place, _ in self.cuts:
            starts[axis] = place * self.data.shape[axis]
        return torch.Size(starts)

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the full tensor."""
        shape = list(self.data.shape)
        for axis, _, places in self.cuts:
            shape[axis] *= places
        return torch.Size(shape)

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        """Return what this rank writes of the tensor ``fqn``."""
        written = TensorWriteData(
            self.__create_chunk_list__()[0],
            TensorProperties.create_from_tensor(self.data),
            self.full_shape,
        )
        index = MetadataIndex(fqn, self.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=written)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds: one."""
        return [ChunkStorageMetadata(self.offsets, self.data.shape)]


class _SavePlanner(DefaultSavePlanner):
    """Torch's own, that finds the tensor of a box."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.data if isinstance(held, Box) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """The same, to load into; torch's own would copy every object that it does not know."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].data


def form_key(form: str, key: str) -> str:
    """Spell ``lora/<factor>``, ``exp_avg/<factor>``, ``rng/<rank>/<kind>``, ... as a form does."""
    kind, _, name = key.partition("/")
    if form == "torch_dist":
        return key
    if kind == "lora":
        return f"model.{name}"
    if kind in (*_STATE, "step"):
        return f"optim.state.{name}.{_STATE.get(kind, kind)}"
    return key.replace("/", ".")


def torch_groups(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``optim.param_groups.<factor>.<key>`` of every factor, as torch's flattened form has them."""
    return {
        f"optim.param_groups.{name}.{key}": value
        for name, group in values.items()
        for key, value in (_GROUP | dict(group)).items()
    }


def write_boxes(
    form: str, directory: Path, boxes: Mapping[str, Box], values: Mapping[str, Any]
) -> None:
    """Write every rank's boxes; collective.

    Args:
        form: one of :data:`FORMS`.
        directory: exists and is empty.
        boxes: by key as :func:`form_key` takes it.
        values: what is no tensor, for the ``dcp`` form: by final key.
    """
    if form == "torch_dist":
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(_sharded(boxes), str(directory))
        return
    state = {form_key(form, key): box for key, box in boxes.items()} | dict(values)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), planner=_SavePlanner())


def read_boxes(form: str, directory: Path, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """Fill every rank's boxes from a checkpoint in a form; collective. Returns ``{key: tensor}``."""
    if form == "torch_dist":
        from megatron.core import dist_checkpointing

        return dict(
            dist_checkpointing.load(
                _sharded(boxes), str(directory), validate_access_integrity=False
            )
        )
    dcp.load(
        {form_key(form, key): box for key, box in boxes.items()},
        storage_reader=dcp.FileSystemReader(directory),
        planner=_LoadPlanner(flatten_state_dict=False),
    )
    return {key: box.data for key, box in boxes.items()}


def read_whole(
    form: str, directory: Path, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Read one full tensor in this process alone, whatever layout wrote it."""
    tensor = torch.empty(shape, dtype=dtype)
    state = {form_key(form, key): tensor}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return tensor


def _sharded(boxes: Mapping[str, Box]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {
        key: ShardedTensor.from_rank_offsets(key, box.data, *box.cuts) for key, box in boxes.items()
    }
