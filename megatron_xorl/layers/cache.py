"""What generation keeps of earlier tokens: one latent key a token and layer, one index key a token and full-indexer layer.

One idea: a token's slot is its position. Rows of a batch may have prompts of different lengths, padded at the end: padding
stands in slots after the row's last token, no query may see those, and the tokens that are generated overwrite them. The
cache travels as Megatron's ``inference_context``.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from torch import Tensor

from megatron_xorl.layers.visible import VisibleKeys

__all__ = ["LatentCache"]


class LatentCache(BaseInferenceContext):
    """Keys of up to ``capacity`` tokens of every row of a batch."""

    def __init__(self, capacity: int) -> None:
        # Megatron asks an inference context for its config only while its own engine is running.
        super().__init__(SimpleNamespace(materialize_only_last_token_logits=False))
        self.capacity = capacity
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        self.keys: dict[tuple[int, str], Tensor] = {}

    def is_static_batching(self) -> bool:
        """Yes: the rows of a batch start and end together."""
        return True

    def is_decode_only(self) -> bool:
        """Whether the tokens of this forward follow earlier ones."""
        return bool(self.keys)

    def feed(self, positions: Tensor) -> None:
        """Say where the tokens of the next forward stand: int64 ``[s, b]``."""
        self.positions = positions

    def visible(self) -> VisibleKeys:
        """Every token of the next forward sees its row up to itself."""
        return VisibleKeys(torch.zeros_like(self.positions), self.positions)

    def store(self, layer_number: int, kind: str, value: Tensor) -> Tensor:
        """Put ``value`` ``[s, b, d]`` of the fed tokens into their slots; return all slots in use, ``[keys, b, d]``."""
        name = (layer_number, kind)
        if name not in self.keys:
            self.keys[name] = value.new_zeros(self.capacity, *value.shape[1:])
        slots = self.positions.unsqueeze(-1).expand(value.shape)
        self.keys[name].scatter_(0, slots, value)
        return self.keys[name][: int(self.positions.max()) + 1]
