"""GLM-5.2 attention: multi-head latent attention over the keys the indexer selected, in the absorbed form.

One idea (absorbed): with ``kv_b_proj`` split per head into K rows and V rows, ``q . (W_K c) = (W_K^T q) . c``, so queries are
moved into the latent space, every head attends to the same ``[kv_lora_rank + rope]`` key, and the latent output is moved out by
``W_V``. The frozen ``kv_b_proj`` is read head by head, never dequantised as a whole; its LoRA is applied in the same form
(``W_K`` and ``W_V`` halves of B, one A), so a ``kv_b_proj`` adapter means the same as in the expanded form.

The selection travels explicitly: :meth:`forward` takes the indices of the last full-indexer layer and returns its own. Nothing
is left on a module or a config between layers, microbatches or models (Megatron-LM issue 6020).

Context parallelism: queries are this rank's, keys the whole row's, gathered in its order (``layers.context``). ``kv_b_proj``
acts on queries and outputs alone, so that each rank's gradient of its factors is the part of its own tokens, and Megatron's sum
over the ranks counts every token once.

A dropout of ``kv_b_proj``'s input makes keys a few columns wider, see ``layers.absorbed``.

Selective recomputation: ``core_attn`` computes the attention over the selection again, ``mla_up_proj`` everything between the
latents and the output projection, so that of the widest activations (``[s, b, heads, kv_lora_rank + rope]``) none is kept.

Megatron's own ``AbsorbedMLASelfAttention`` is not reused: it carries indices on shared objects, has one epsilon for all norms,
cannot express ``indexer_types``, and reads ``linear_kv_up_proj.weight`` as a plain tensor (0.19.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_xorl.errors import LayoutError
from megatron_xorl.layers.absorbed import absorbed_product, key_products
from megatron_xorl.layers.cache import LatentCache
from megatron_xorl.layers.context import ContextSplit, Placement
from megatron_xorl.layers.indexer import Indexer
from megatron_xorl.layers.provider import FrozenSpecProvider
from megatron_xorl.layers.recompute import recomputed_modules
from megatron_xorl.layers.rope import rotary_cos_sin, rotate
from megatron_xorl.layers.sparse import attend_selected
from megatron_xorl.layers.token_keys import bound
from megatron_xorl.layers.visible import VisibleKeys, causal_keys

__all__ = ["SparseLatentAttention"]


class SparseLatentAttention(MegatronModule):
    """MLA + DSA of one layer.

    A ``"full"`` layer owns an indexer under ``core_attention.indexer``; a ``"shared"`` one owns none and uses the selection
    that was handed to it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        provider: FrozenSpecProvider,
        pg_collection: Any,
        cp_comm_type: str | None = None,
        name: str | None = None,
        **_megatron: Any,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type, name
        glm = provider.glm
        self.glm, self.layer_number, self.tp_group = glm, layer_number, pg_collection.tp
        self.context_split = ContextSplit(pg_collection.cp)
        self.heads = glm.num_attention_heads // self.tp_group.size()
        self.scale = glm.qk_head_dim**-0.5
        replicated, column, row = (
            provider.linear(),
            provider.column_parallel_linear(),
            provider.row_parallel_linear(),
        )
        norm = provider.layer_norm(rms_norm=True)
        common = {"config": config, "tp_group": self.tp_group}
        kv_rows = glm.num_attention_heads * (glm.qk_nope_head_dim + glm.v_head_dim)
        self.linear_q_down_proj = replicated(glm.hidden_size, glm.q_lora_rank, **common)
        self.q_layernorm = norm(config=config, hidden_size=glm.q_lora_rank, eps=glm.latent_norm_eps)
        self.linear_q_up_proj = column(
            glm.q_lora_rank, glm.num_attention_heads * glm.qk_head_dim, **common
        )
        self.linear_kv_down_proj = replicated(
            glm.hidden_size, glm.kv_lora_rank + glm.qk_rope_head_dim, **common
        )
        self.kv_layernorm = norm(
            config=config, hidden_size=glm.kv_lora_rank, eps=glm.latent_norm_eps
        )
        self.linear_kv_up_proj = column(glm.kv_lora_rank, kv_rows, **common)
        self.linear_proj = row(glm.num_attention_heads * glm.v_head_dim, glm.hidden_size, **common)
        full = glm.indexer_types[layer_number - 1] == "full"
        self.core_attention = nn.Module()
        self.core_attention.indexer = (
            Indexer(config, layer_number, provider=provider, tp_group=self.tp_group)
            if full
            else None
        )
        self.recomputed = recomputed_modules(config)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        selected: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        cache: LatentCache | None = None,
    ) -> tuple[tuple[Tensor, None], Tensor]:
        """Attend.

        Args:
            hidden_states: ``[s/tp, b, h]``, after the input norm; s is what this context rank holds of the row.
            selected: int32 ``[s, b, topk]``, the selection of the layer's source, in slots of the row; ignored by a full layer.
            packed_seq_params: documents packed along the whole row (``cu_seqlens_q``), b = 1.
            cache: keys of earlier tokens, when generating.

        Returns:
            ``((output [s/tp, b, h], None), selected [s, b, topk])``.
        """
        glm = self.glm
        q_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        place, visible = self._place(q_latent, packed_seq_params, cache)
        rope = rotary_cos_sin(
            visible.positions, glm.qk_rope_head_dim, glm.rope_theta, hidden_states.dtype
        )
        if self.core_attention.indexer is not None:
            selected = self.core_attention.indexer(
                hidden_states, q_latent, rope, visible, cache, place
            )
        if selected is None:
            raise LayoutError(
                f"layer {self.layer_number - 1} shares the indexer of layer {glm.indexer_source(self.layer_number - 1)}, "
                "but no selection reached it; a pipeline stage must begin on a full-indexer layer"
            )
        key = self._keys(hidden_states, rope)
        if cache is not None:
            key = cache.store(self.layer_number, "latent", key)
        attend = partial(self._attend, place)
        output = self._checkpointed("mla_up_proj", attend, q_latent, key, selected, *rope)
        return self.linear_proj(output), selected

    def _place(
        self, q_latent: Tensor, packed: PackedSeqParams | None, cache: LatentCache | None
    ) -> tuple[Placement, VisibleKeys]:
        """Where this rank's tokens stand in the row, and the keys that each may see."""
        group, device, batch = self.context_split.group, q_latent.device, q_latent.shape[1]
        if cache is not None:
            if group.size() > 1:
                raise LayoutError(
                    f"a generation cache holds whole rows, found context parallel size {group.size()}; generate with cp 1"
                )
            return Placement(None, group), cache.visible()
        local = q_latent.shape[0] * (self.tp_group.size() if self.config.sequence_parallel else 1)
        length = local * group.size()
        place = self.context_split.place(length, device, packed, batch)
        return place, causal_keys(length, packed, device, batch).of(place.slots)

    def _checkpointed(
        self, region: str, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Run ``function``, keeping only its inputs for backward if ``region`` is to be recomputed."""
        if region in self.recomputed and self.training:
            result: Tensor = tensor_parallel.checkpoint(bound(function), False, *inputs)
            return result
        return function(*inputs)

    def _attend(
        self,
        place: Placement,
        q_latent: Tensor,
        key: Tensor,
        selected: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """``[s, b, heads * v_head_dim]`` from the q latent, this rank's keys and the selection."""
        glm = self.glm
        query = self._queries(q_latent, (cos, sin))
        attend = partial(self._attend_latent, place)
        latent = self._checkpointed("core_attn", attend, query, key, selected)
        rows = slice(glm.qk_nope_head_dim, glm.qk_nope_head_dim + glm.v_head_dim)
        return self._kv_up(latent, rows, contract="cols").flatten(2)

    def _attend_latent(
        self, place: Placement, query: Tensor, key: Tensor, selected: Tensor
    ) -> Tensor:
        # Gathered here, inside what may be recomputed: then a layer keeps this rank's keys for backward and not the row's.
        key = place.whole(key)
        latent = key.shape[-1] - self.glm.qk_rope_head_dim
        return attend_selected(query, key, selected, self.scale, latent)

    def _queries(self, q_latent: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Absorbed queries ``[s, b, heads, kv_lora_rank + rope]``."""
        glm = self.glm
        q = self.linear_q_up_proj(q_latent)[0]
        q = q.view(*q.shape[:2], self.heads, glm.qk_head_dim)
        q_nope, q_rope = q.split([glm.qk_nope_head_dim, glm.qk_rope_head_dim], dim=-1)
        q_rope = rotate(
            q_rope, rope[0].unsqueeze(2), rope[1].unsqueeze(2), interleaved=glm.rope_interleave
        )
        absorbed = self._kv_up(q_nope, slice(0, glm.qk_nope_head_dim), contract="rows")
        return torch.cat([absorbed, q_rope], dim=-1)

    def _keys(self, hidden_states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Latent and rotary key of every token of this context rank, shared by all heads: ``[s, b, kv_lora_rank + rope]``."""
        glm = self.glm
        kv = self.linear_kv_down_proj(hidden_states)[0]
        latent, k_rope = kv.split([glm.kv_lora_rank, glm.qk_rope_head_dim], dim=-1)
        latent = self.kv_layernorm(latent)
        kv = torch.cat([latent, *key_products(self.linear_kv_up_proj, latent), k_rope], dim=-1)
        if self.tp_group.size() > 1:
            # Each rank's heads use every key; backward sums the ranks' partial gradients (reduce-scatter).
            kv = gather_from_sequence_parallel_region(kv, group=self.tp_group)
        rope_width = glm.qk_rope_head_dim
        latent, k_rope = kv.split([kv.shape[-1] - rope_width, rope_width], dim=-1)
        return torch.cat([latent, rotate(k_rope, *rope, interleaved=glm.rope_interleave)], dim=-1)

    def _kv_up(self, x: Tensor, rows: slice, *, contract: str) -> Tensor:
        """Apply one half of ``kv_b_proj`` head by head to ``[s, b, heads, d]``, base and adapter."""
        return absorbed_product(self.linear_kv_up_proj, x, self.heads, rows, contract=contract)
