"""The head: a frozen, vocabulary-parallel linear with an adapter, which can go from hidden states straight to losses.

One idea: Megatron's ``GPTModel.forward`` takes an ``output_processor`` that stands in the place of "logits, then cross-entropy".
A forward pre-hook on the model passes ours wherever labels are given, so our entry, a foreign ``pretrain_gpt.py``-style script
and the library all get Megatron's per-token losses ``[b, s]`` without logits of the whole sequence (``layers.loss``). Without
labels, or with a processor of the caller's, the model gives full logits as ever.

A dropout of the head's adapter takes its keys (``layers.token_keys``) from the model's ``attention_mask``, which Megatron hands
to the processor; for logits without labels a processor of ours passes them on too.

Not trained and not computed, forward or backward: labels of -100, and tokens that a ``loss_mask`` given to the model leaves out.
Their loss is 0. Megatron's ``--cross-entropy-loss-fusion`` has nothing left to choose.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_xorl.layers.dropout import drop_of
from megatron_xorl.layers.linear import ColumnParallelLinear
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.loss import CHUNK_BYTES, token_losses
from megatron_xorl.layers.token_keys import Tokens, are_keys, tokens_of, using

__all__ = ["IGNORED", "Head", "losses_through_the_head"]

IGNORED = -100
"""Label of a token that is not trained; ``torch.nn.functional.cross_entropy``'s default."""

_MASK, _LABELS = (
    2,
    4,
)  # places of ``attention_mask`` and ``labels`` among GPTModel.forward's positional arguments


class Head(ColumnParallelLinear):
    """The output layer of a stage: logits by :meth:`forward`, losses by :meth:`losses`.

    Attributes:
        chunk_bytes: bound on the logits that exist at a time, see :data:`megatron_xorl.layers.loss.CHUNK_BYTES`.
    """

    chunk_bytes = CHUNK_BYTES

    def losses(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """Per-token cross-entropy, fp32 ``[b, s]``, 0 where a token is not trained.

        Args:
            hidden: ``[s/tp, b, H]``, this rank's part of the sequence.
            labels: int64 ``[b, s]``, the whole sequence on every rank; -100 is not trained.
            loss_mask: ``[b, s]``; 0 is not trained either.

        Raises:
            DataError: a label is neither -100 nor in the vocabulary.
            AdapterError: the adapter has a dropout, the mode is training and there are no current tokens.
        """
        trained = labels != IGNORED
        if loss_mask is not None:
            trained = trained & (loss_mask != 0)
        # In [s, b] order, as the hidden states are.
        places = trained.t().flatten().nonzero().squeeze(1)
        rows = self._gather(hidden).flatten(0, 1).index_select(0, places)
        pair = self._pair()
        drop = None if pair is None else drop_of(pair, self.training, whole=True)
        losses = token_losses(
            rows,
            labels.t().flatten()[places],
            self.base,
            pair,
            self.tp_group,
            self.chunk_bytes,
            None if drop is None else drop.at(places),
        )
        whole = losses.new_zeros(labels.numel()).index_copy(0, places, losses)
        return whole.view(labels.shape[1], labels.shape[0]).t().contiguous()

    def tokens(self, mask: Tensor | None) -> Tokens | None:
        """The keys that came as ``attention_mask``, in the order of the hidden states."""
        return tokens_of(mask, self.tp_group, split=self.sequence_parallel)

    def _pair(self) -> LoraPair | None:
        for pair in self.adapters.values():
            assert isinstance(pair, LoraPair)
            return pair
        return None


def losses_through_the_head(model: nn.Module) -> None:
    """Let ``model(…, labels=…)`` of a ``GPTModel`` go through :meth:`Head.losses` of its ``output_layer``."""
    model.register_forward_pre_hook(_pass_processor, with_kwargs=True)


def _pass_processor(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    labels = named.get("labels", args[_LABELS] if len(args) > _LABELS else None)
    mask = named.get("attention_mask", args[_MASK] if len(args) > _MASK else None)
    if named.get("output_processor") is not None or (labels is None and not are_keys(mask)):
        return None
    return args, named | {"output_processor": _logits if labels is None else _losses}


def _losses(
    *,
    hidden_states: Tensor,
    output_layer: Head,
    labels: Tensor,
    loss_mask: Tensor | None,
    attention_mask: Tensor | None,
    **_megatron: Any,
) -> Tensor:
    with using(output_layer.tokens(attention_mask)):
        return output_layer.losses(hidden_states, labels, loss_mask)


def _logits(
    *,
    hidden_states: Tensor,
    output_layer: Head,
    attention_mask: Tensor | None,
    runtime_gather_output: bool | None,
    **_megatron: Any,
) -> Tensor:
    with using(output_layer.tokens(attention_mask)):
        logits, _ = output_layer(hidden_states, runtime_gather_output=runtime_gather_output)
    return logits.transpose(0, 1).contiguous()
