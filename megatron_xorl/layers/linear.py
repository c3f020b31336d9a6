"""LoRA-aware linears in the three parallel forms of Megatron: replicated, column-parallel, row-parallel.

One idea: ``y = base(x) + sum over adapted projections of scale * B (A x)``, where the base is a frozen weight (block FP8 or
dense), and *an adapter's output is in the same parallel state as its base's output*. A fused base (gate|up) keeps one frozen
GEMM with independent logical factors on its row ranges (``slots``).

Gradient ownership (no autograd hooks, no extra all-reduce): a factor that every tensor rank holds in full gets a partial
gradient on each, because sequence parallelism gives each rank other tokens or other output rows; such a factor carries
``sequence_parallel = True`` and Megatron sums it over the tensor group in ``finalize_model_grads``. A cut factor's gradient
is complete on its rank.

Dropout of an adapter's input (``layers.dropout``) leaves the base's product alone; :attr:`AdaptedLinear.whole_rows` says which
tokens' rows come in.

Refused: tensor parallelism without sequence parallelism, biases, gathered outputs of adapted column-parallel layers other
than the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_xorl.errors import LayoutError
from megatron_xorl.fp8.linear import (
    LoraOperand,
    adapted_linear,
    frozen_linear,
    lora_add,
    lora_shrink,
)
from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.dropout import drop_of, dropped_shrink, drops
from megatron_xorl.layers.host import AdapterHost, Rows
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.recompute import one_edge

__all__ = ["AdaptedLinear", "ColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear"]


class AdaptedLinear(AdapterHost):
    """A frozen linear of one tensor rank, ``[out_local, in_local]``, that LoRA pairs can be attached to.

    Attributes:
        whole_rows: whether its input has the rows of the whole sequence, or of this rank's part under sequence parallelism.
    """

    whole_rows = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: TransformerConfig,
        block: tuple[int, int] | None,
        tp_group: dist.ProcessGroup | None,
        parts: int = 1,
    ) -> None:
        super().__init__(
            FrozenWeight(
                (out_features, in_features),
                block=block,
                dtype=config.params_dtype,
                device=buffer_device(config),
                parts=parts,
            )
        )
        self.config = config
        self.tp_group = (
            tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
        )
        self.sequence_parallel = config.sequence_parallel
        if self.tp_group.size() > 1 and not self.sequence_parallel:
            raise LayoutError(
                f"tensor parallel size is {self.tp_group.size()} with sequence_parallel off; adapters need it on at TP > 1 "
                "(their gradients are summed over the tensor group only then); pass --sequence-parallel"
            )

    def _placed(self) -> list[tuple[LoraPair, Rows]]:
        """The adapters and the rows of the output that each adds to."""
        return [(self.adapters[leaf], self.rows_of(leaf)) for leaf in self.leaves if leaf in self.adapters]  # fmt: skip

    def _adapted(self, x: Tensor) -> Tensor:
        """Base and adapters where nothing is communicated between a product and the next."""
        placed = self._placed()
        if any(len(rows) > 1 or drops(pair, self.training) for pair, rows in placed):
            x = one_edge(x)
            return self._add_adapters(frozen_linear(x, self.base), x, lambda t: t)
        operands = [LoraOperand(pair.lora_A, pair.lora_B, pair.scale, rows) for pair, (rows,) in placed]  # fmt: skip
        return adapted_linear(x, self.base, operands)

    def _add_adapters(self, y: Tensor, x: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
        """Add every adapter's product to ``y``; ``between`` moves the rank-r product to the base output's parallel state."""
        for pair, ranges in self._placed():
            t = between(self._shrunk(x, pair))
            sizes = [rows.stop - rows.start for rows in ranges]
            # One backward node for all parts of B, and none where B is one part.
            parts = pair.lora_B.split(sizes) if len(ranges) > 1 else (pair.lora_B,)
            for rows, b in zip(ranges, parts, strict=True):
                y = lora_add(y, t, b, rows)
        return y

    def _shrunk(self, x: Tensor, pair: LoraPair) -> Tensor:
        """``scale x A^T`` ``[..., r]``, of what the pair's dropout leaves of x."""
        drop = drop_of(pair, self.training, whole=self.whole_rows)
        if drop is None:
            return lora_shrink(x, pair.lora_A, pair.scale)
        return dropped_shrink(x, pair.lora_A, pair.scale, drop)

    def backward_dw(self) -> None:
        """Nothing: a frozen base has no weight gradient."""


class ReplicatedLinear(AdaptedLinear):
    """The whole weight on every tensor rank, applied to the rank's own part of the sequence.

    Megatron's column-parallel form of the MLA down projections has wrong rope gradients at TP > 1, so ours are replicated.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        block: tuple[int, int] | None,
        tp_group: dist.ProcessGroup | None = None,
        **_megatron: Any,
    ) -> None:
        super().__init__(input_size, output_size, config=config, block=block, tp_group=tp_group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``[..., in]`` -> ``([..., out], None)``; Megatron's (output, bias) convention."""
        return self._adapted(x), None


class ColumnParallelLinear(AdaptedLinear):
    """Output rows cut over the tensor group.

    With ``stride=2`` (Megatron's gate|up) the local rows are ``[gate_local | up_local]``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        block: tuple[int, int] | None,
        tp_group: dist.ProcessGroup | None = None,
        gather_output: bool = False,
        stride: int = 1,
        **_megatron: Any,
    ) -> None:
        group = (
            tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
        )
        local = divide(output_size, group.size(), "output rows")
        super().__init__(
            input_size, local, config=config, block=block, tp_group=group, parts=stride
        )
        self.gather_output = gather_output

    def forward(
        self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """``[s/tp, b, in]`` -> ``([s, b, out/tp], None)``.

        ``weight`` must be None (there are no tied weights here); ``runtime_gather_output`` gathers the last dimension.
        """
        if weight is not None:
            raise LayoutError(
                "a weight was passed to a frozen linear; tied embeddings are not supported by GLM-5.2 specs"
            )
        x = one_edge(x)
        if self.tp_group.size() == 1:
            return self._adapted(x), None
        y = self._add_adapters(frozen_linear(self._gather(x), self.base), x, self._gather)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, None

    def _gather(self, x: Tensor) -> Tensor:
        """Whole sequence from its parts; backward sums the ranks' contributions."""
        if self.tp_group.size() == 1:
            return x
        return gather_from_sequence_parallel_region(x, group=self.tp_group)


class RowParallelLinear(AdaptedLinear):
    """Input columns cut over the tensor group; the partial outputs are summed and scattered over the sequence."""

    whole_rows = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        block: tuple[int, int] | None,
        tp_group: dist.ProcessGroup | None = None,
        **_megatron: Any,
    ) -> None:
        group = (
            tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
        )
        local = divide(input_size, group.size(), "input columns")
        super().__init__(local, output_size, config=config, block=block, tp_group=group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``[s, b, in/tp]`` -> ``([s/tp, b, out], None)``."""
        if self.tp_group.size() == 1:
            return self._adapted(x), None
        return self._add_adapters(self._reduce(frozen_linear(x, self.base)), x, self._reduce), None

    def _reduce(self, y: Tensor) -> Tensor:
        return reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)


def divide(size: int, world: int, what: str) -> int:
    """``size / world``, or a LayoutError that names ``what`` cannot be cut."""
    if size % world:
        raise LayoutError(
            f"{size} {what} cannot be cut over {world} tensor ranks; use a divisor of {size}"
        )
    return size // world


def buffer_device(config: TransformerConfig) -> torch.device | str:
    """Where frozen buffers are allocated under this config."""
    if config.init_model_with_meta_device:
        return "meta"
    return (
        "cpu"
        if config.use_cpu_initialization
        else torch.device("cuda", torch.cuda.current_device())
    )
