"""Shared-outer LoRA factors of a bank applied once per token instead of once per dispatched row.

One idea: a factor that is one for all experts commutes with the dispatch. A token that goes to k experts has one
``t = x A^T`` for gate and one for up, computed before the dispatch and sent along with ``x`` as further columns; and since
``sum_e p_e B (A_e h_e) = B sum_e p_e (A_e h_e)``, the experts' rank-r products of down travel back as further columns, are
summed over the experts by the dispatcher's own combine, and meet B once. Rows are as wide on the way back as on the way
out, the shorter side padded with zeros, because a dispatcher remembers one width.

In bf16 ``t`` is rounded where it always was. What moves is down's sum over experts: every ``p_e A_e h_e`` is rounded once and
the k terms are added as the dispatcher adds outputs (in bf16 one rounding a term, over expert-tensor ranks in fp32), so the sum
is off by at most ``(k + 1) 2^-8 sum_e |p_e A_e h_e|`` an element, times B; before, B's product was rounded for each expert.

Only factors of size 1 on the expert axis are taken, the rest stay with the rows.

Dropout (``layers.dropout``): gate and up have one mask a token, applied with A before the dispatch. Down's input exists after it
only, so the token's key goes along as eight further columns, one byte each, which every float dtype holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_xorl.layers.dropout import current_tokens, drop_of, dropped_shrink, drops
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.token_keys import KEY_COLUMNS, from_columns, to_columns

__all__ = ["Outer", "outer_of"]


@dataclass(frozen=True)
class Outer:
    """The pairs of one bank whose shared factor acts once per token, and how their products travel.

    Attributes:
        hidden: width H of a token.
        before: pairs (gate, up) whose A ``[1, r, H]`` is applied before the dispatch.
        after: pairs (down) whose B ``[1, H, r]`` is applied after the combine.
        training: mode of the bank.
        keyed: a row carries its token's key.
    """

    hidden: int
    before: tuple[LoraPair, ...]
    after: tuple[LoraPair, ...]
    training: bool = False
    keyed: bool = False

    @property
    def columns(self) -> int:
        """Columns that a row carries besides its H own."""
        return max(sum(self._outward), sum(_ranks(self.after)))

    @property
    def _outward(self) -> list[int]:
        """Widths of what a row carries to the experts: products, then the key."""
        return [*_ranks(self.before), *([KEY_COLUMNS] if self.keyed else [])]

    def widen(self, x: Tensor) -> Tensor:
        """Tokens ``[..., H]`` -> ``[..., H + columns]``, as they enter the dispatch."""
        parts = [x, *(self._product(x, pair) for pair in self.before)]
        if self.keyed:
            parts.append(to_columns(current_tokens("the routed bank").part, x))
        return self._padded(parts)

    def _product(self, x: Tensor, pair: LoraPair) -> Tensor:
        drop = drop_of(pair, self.training)
        if drop is None:
            return F.linear(x, pair.lora_A[0])
        return dropped_shrink(x, pair.lora_A[0], 1.0, drop)

    def split(self, rows: Tensor) -> tuple[Tensor, dict[LoraPair, Tensor], Tensor | None]:
        """Dispatched rows ``[T, H + columns]`` -> ``[T, H]``, ``{pair: t [T, r]}`` and the tokens' keys ``[T]``, if keyed.

        Each part is a copy: a view that autograd keeps would keep the whole rows, and a product's bits can depend on strides.
        """
        widths = self._outward
        parts = rows.split([self.hidden, *widths, self.columns - sum(widths)], dim=-1)
        x, *ts = (part.contiguous() for part in parts[: 1 + len(self.before)])
        keys = from_columns(parts[len(widths)]) if self.keyed else None
        return x, dict(zip(self.before, ts, strict=True)), keys

    def join(self, y: Tensor, products: list[Tensor]) -> Tensor:
        """Weighted outputs ``[T, H]`` and rank-r products ``[T, r]`` -> rows ``[T, H + columns]`` for the combine."""
        return self._padded([y, *products])

    def narrow(self, rows: Tensor) -> Tensor:
        """Combined rows ``[..., H + columns]`` -> ``[..., H]``: B meets the sum over experts."""
        ranks = _ranks(self.after)
        parts = rows.split([self.hidden, *ranks, self.columns - sum(ranks)], dim=-1)
        y = parts[0]
        for pair, summed in zip(self.after, parts[1:], strict=False):
            y = y + F.linear(summed.contiguous(), pair.lora_B[0]) * pair.scale
        return y

    def _padded(self, parts: list[Tensor]) -> Tensor:
        missing = self.hidden + self.columns - sum(part.shape[-1] for part in parts)
        if missing:
            parts = [*parts, parts[0].new_zeros(*parts[0].shape[:-1], missing)]
        return torch.cat(parts, dim=-1)


def outer_of(
    inner: AdapterHost, outer: AdapterHost, *, once_per_token: bool = True
) -> Outer | None:
    """What of a bank's gate|up (``inner``) and down (``outer``) acts once per token or goes with the rows; ``None`` if nothing.

    With ``once_per_token`` False no factor acts there.
    """
    training = inner.training
    pairs = [*inner.adapters.values(), *outer.adapters.values()]
    found = Outer(
        hidden=inner.base.shape[-1],
        before=_shared(inner, "A") if once_per_token else (),
        after=_shared(outer, "B") if once_per_token else (),
        training=training,
        keyed=any(isinstance(pair, LoraPair) and drops(pair, training) for pair in pairs),
    )
    return found if found.columns else None


def _shared(host: AdapterHost, side: str) -> tuple[LoraPair, ...]:
    pairs = (pair for pair in host.adapters.values() if isinstance(pair, LoraPair))
    return tuple(pair for pair in pairs if pair.slices[side].factor.shared)


def _ranks(pairs: Iterable[LoraPair]) -> list[int]:
    return [pair.slices["A"].factor.rank for pair in pairs]
