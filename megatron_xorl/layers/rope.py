"""Rotary positions for MLA and the indexer.

GLM rotates *interleaved* pairs ``(x0, x1), (x2, x3), …`` and leaves the result de-interleaved (first elements, then second
ones); dot products do not see the permutation since queries and keys share it. Angles are computed in fp32 from the positions
at every call, so no buffer exists that a bf16 cast could ruin.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_cos_sin", "rotate"]


def rotary_cos_sin(
    positions: Tensor, dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[..., dim / 2]`` of integer positions ``[...]``: fp32 angles, cast to ``dtype``."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angle = positions.unsqueeze(-1).float() * (1.0 / theta**exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the last dimension of ``x`` ``[..., dim]``; ``cos``/``sin`` ``[..., dim / 2]`` broadcast over heads."""
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
