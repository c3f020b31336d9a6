"""``kv_b_proj`` where the absorbed attention uses it: one half of it, head by head, base and adapter.

One idea: with ``W + scale B A`` in the place of W, a key's K part is ``W_K c + B_K t`` and its V part ``W_V c + B_V t``, where
``t = scale A c`` belongs to the key alone. Without dropout ``t`` is folded into the latent space like W is, at no width.
With dropout ``t = scale A drop(c)`` is no function of c, so it stands beside c in the key, r columns wide (:func:`key_products`),
and queries and outputs have the same further columns (:func:`absorbed_product`): exact, and never expanded over heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_xorl.fp8.linear import frozen_head_matmul
from megatron_xorl.layers.dropout import drop_of, dropped_shrink, drops
from megatron_xorl.layers.linear import ColumnParallelLinear
from megatron_xorl.layers.lora import LoraPair

__all__ = ["absorbed_product", "key_products"]


def key_products(linear: ColumnParallelLinear, latent: Tensor) -> list[Tensor]:
    """``[..., r]`` of every adapter that has a dropout now, from this rank's latents ``[s/tp, b, kv_lora_rank]``.

    Raises:
        AdapterError: there is a dropout and there are no current tokens.
    """
    found = [(pair, drop_of(pair, linear.training)) for pair in _pairs(linear)]
    return [
        dropped_shrink(latent, pair.lora_A, pair.scale, drop) for pair, drop in found if drop is not None
    ]  # fmt: skip


def absorbed_product(
    linear: ColumnParallelLinear, x: Tensor, heads: int, rows: slice, *, contract: str
) -> Tensor:
    """Multiply each head's part of ``x`` with its ``rows`` of ``kv_b_proj``.

    Args:
        linear: ``kv_b_proj``, ``[heads * R, kv_lora_rank]`` on this rank.
        x: ``[s, b, heads, d]``.
        heads: of this rank.
        rows: which of a head's R rows: the K half, or the V half.
        contract: ``"rows"``: queries, d rows, into the space of a key without rope: kv_lora_rank and the further columns;
            ``"cols"``: from that space to the rows.
    """
    flat, products = x.flatten(0, 1), []
    pairs = _pairs(linear)
    dropping = [pair for pair in pairs if drops(pair, linear.training)]
    if contract == "cols" and dropping:
        widths = [linear.base.shape[1], *(pair.lora_A.shape[0] for pair in dropping)]
        flat, *products = (part.contiguous() for part in flat.split(widths, dim=-1))
    y = frozen_head_matmul(flat, linear.base, rows, contract=contract)
    further: list[Tensor] = []
    for pair in pairs:
        b = pair.lora_B.view(heads, -1, pair.lora_B.shape[1])[:, rows]  # [heads, rows, r]
        if contract == "rows":
            t = torch.einsum("thd,hdr->thr", flat, b)
            if drops(pair, linear.training):
                further.append(t)
            else:
                y = y + t @ pair.lora_A * pair.scale
        elif drops(pair, linear.training):
            y = y + torch.einsum("thr,hdr->thd", products.pop(0), b)
        else:
            y = y + torch.einsum("thr,hdr->thd", flat @ pair.lora_A.t(), b) * pair.scale
    if further:
        y = torch.cat([y, *further], dim=-1)
    return y.view(*x.shape[:-1], y.shape[-1])


def _pairs(linear: ColumnParallelLinear) -> list[LoraPair]:
    return [pair for pair in linear.adapters.values() if isinstance(pair, LoraPair)]
