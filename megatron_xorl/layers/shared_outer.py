"""Shared-outer LoRA factors of a bank applied once per token instead of once per dispatched row.

One idea: a factor that is one for all experts commutes with the dispatch. A token that goes to k experts has one
``t = x A^T`` for gate and one for up, computed before the dispatch and sent along with ``x`` as further columns; and since
``sum_e p_e B (A_e h_e) = B sum_e p_e (A_e h_e)``, the experts' rank-r products of down travel back as further columns, are
summed over the experts by the dispatcher's own combine, and meet B once. Rows are as wide on the way back as on the way
out, the shorter side padded with zeros, because a dispatcher remembers one width.

In bf16 ``t`` is rounded where it always was. What moves is down's sum over experts: every ``p_e A_e h_e`` is rounded once and
the k terms are added as the dispatcher adds outputs (in bf16 one rounding a term, over expert-tensor ranks in fp32), so the sum
is off by at most ``(k + 1) 2^-8 sum_e |p_e A_e h_e|`` an element, times B; before, B's product was rounded for each expert.

Only factors of size 1 on the expert axis are taken, the rest stay with the rows. What must act on single rows between the
dispatch and a shared A (a dropout with a mask of its own for every row) does not commute: such a bank sets
``once_per_token = False``. A dropout before the dispatch, or on down's input, is no obstacle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.lora import LoraPair

__all__ = ["Outer", "outer_of"]


@dataclass(frozen=True)
class Outer:
    """The pairs of one bank whose shared factor acts once per token, and how their products travel.

    Attributes:
        hidden: width H of a token.
        before: pairs (gate, up) whose A ``[1, r, H]`` is applied before the dispatch.
        after: pairs (down) whose B ``[1, H, r]`` is applied after the combine.
    """

    hidden: int
    before: tuple[LoraPair, ...]
    after: tuple[LoraPair, ...]

    @property
    def columns(self) -> int:
        """Columns that a row carries besides its H own."""
        return max(sum(_ranks(self.before)), sum(_ranks(self.after)))

    def widen(self, x: Tensor) -> Tensor:
        """Tokens ``[..., H]`` -> ``[..., H + columns]``, as they enter the dispatch."""
        return self._padded([x, *(F.linear(x, pair.lora_A[0]) for pair in self.before)])

    def split(self, rows: Tensor) -> tuple[Tensor, dict[LoraPair, Tensor]]:
        """Dispatched rows ``[T, H + columns]`` -> ``[T, H]`` and ``{pair: t [T, r]}``.

        Each part is a copy: a view that autograd keeps would keep the whole rows, and a product's bits can depend on strides.
        """
        ranks = _ranks(self.before)
        parts = rows.split([self.hidden, *ranks, self.columns - sum(ranks)], dim=-1)
        x, *ts = (part.contiguous() for part in parts[: 1 + len(ranks)])
        return x, dict(zip(self.before, ts, strict=True))

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


def outer_of(inner: AdapterHost, outer: AdapterHost) -> Outer | None:
    """What of a bank's gate|up (``inner``) and down (``outer``) can act once per token; ``None`` if nothing can."""
    found = Outer(
        hidden=inner.base.shape[-1],
        before=_shared(inner, "A"),
        after=_shared(outer, "B"),
    )
    return found if found.columns else None


def _shared(host: AdapterHost, side: str) -> tuple[LoraPair, ...]:
    pairs = (pair for pair in host.adapters.values() if isinstance(pair, LoraPair))
    return tuple(pair for pair in pairs if pair.slices[side].factor.shared)


def _ranks(pairs: Iterable[LoraPair]) -> list[int]:
    return [pair.slices["A"].factor.rank for pair in pairs]
