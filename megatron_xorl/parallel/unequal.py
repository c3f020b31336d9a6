"""Parts of unequal length gathered over a group whose backend wants equal ones.

Megatron's all-to-all dispatcher gathers the tokens of the expert-tensor ranks, which at EP > 1 are as many as the routers chose.
NCCL takes a list of unequal parts; gloo refuses it. Here every part is padded to the longest, gathered and cut again: the same
values, for the bytes of the padding. The scatter of the way back takes unequal parts on both.

Refuses nothing: the lengths come from the dispatcher, which has told them to every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gathering_unequal"]


def gathering_unequal(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's ``_gather_along_first_dim`` so that it needs parts of one length alone."""

    @functools.wraps(gather)
    def gathered(
        input_: Tensor,
        group: Any,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = gather(padded, group, None, use_global_buffer).split(longest) if longest else ()
        if not parts:
            return input_
        return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes, strict=True)])

    return gathered
