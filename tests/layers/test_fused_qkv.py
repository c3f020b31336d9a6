"""Adapters of q, k and v on one fused, frozen weight: three linears under PEFT, and Megatron's own split, are the oracles.

The reference runs in fp64; 1e-6 (relative, fp32) is the design's limit for a frozen linear against it.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, FormatError, LayoutError
from tests.training.comparison import relative
from tests.training.harness import random_like, use_one_process
from tests.worlds import run_world

LIMIT = 1e-6
LEAVES = ("q_proj", "k_proj", "v_proj")
HIDDEN, HEAD, RANK, ALPHA, LENGTH, BATCH = 48, 16, 3, 6, 10, 2
PREFIX = "model.layers.0.self_attn"
SUBSETS = [part for n in (1, 2, 3) for part in itertools.combinations(LEAVES, n)]


class Case(NamedTuple):
    """A geometry and which projections carry adapters."""

    heads: int
    groups: int
    leaves: tuple[str, ...] = LEAVES
    block: int | None = None

    def rows(self, leaf: str) -> int:
        return (self.heads if leaf == "q_proj" else self.groups) * HEAD


def draw(name: str, *shape: int) -> Tensor:
    return random_like(name, shape)


def quantized(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes, and scales that differ from block to block by factors of two."""
    grid = [-(-size // block) for size in weight.shape]
    scales = torch.exp2(torch.arange(grid[0] * grid[1]).view(grid) % 3 - 6.0)
    return (weight * 64).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def weights(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each projection as a checkpoint holds it, and its values in fp64."""
    held, values = {}, {}
    for leaf in LEAVES:
        weight = draw(leaf, case.rows(leaf), HIDDEN)
        held[leaf], values[leaf] = weight, weight.double()
        if case.block:
            codes, scales = quantized(weight, case.block)
            held[leaf], held[f"{leaf} scales"] = codes, scales
            wide = scales.double().repeat_interleave(case.block, 0).repeat_interleave(case.block, 1)
            values[leaf] = codes.double() * wide[: weight.shape[0], : weight.shape[1]]
    return held, values


def by_peft(case: Case) -> dict[str, Tensor]:
    """Three linears with PEFT's LoRA in fp64: outputs ``[s, b, heads, HEAD]``, and gradients."""
    from peft import LoraConfig, get_peft_model

    _, values = weights(case)
    model = nn.Module()
    for leaf in LEAVES:
        linear = nn.Linear(HIDDEN, case.rows(leaf), bias=False).double()
        linear.weight.data.copy_(values[leaf])
        setattr(model, leaf, linear)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(case.leaves))
    model = get_peft_model(model, config).double().base_model.model
    x = draw("x", LENGTH, BATCH, HIDDEN).double().requires_grad_()
    found, factors = {}, {}
    for leaf in LEAVES:
        linear = getattr(model, leaf)
        for side in "AB" if leaf in case.leaves else "":
            factor = getattr(linear, f"lora_{side}").default.weight
            name = f"{PREFIX}.{leaf}.lora_{side}"
            factor.data.copy_(random_like(name, tuple(factor.shape)))
            factors[name] = factor
        found[leaf] = linear(x).unflatten(-1, (-1, HEAD))
    torch.autograd.backward(list(found.values()), [gradient(found[leaf], leaf) for leaf in found])
    outputs = {leaf: value.detach() for leaf, value in found.items()}
    return outputs | {"x": x.grad} | {name: factor.grad for name, factor in factors.items()}


def gradient(output: Tensor, leaf: str) -> Tensor:
    return draw(f"d{leaf}", *output.shape).to(output.dtype)


def attention(case: Case, tp: int = 1) -> Any:
    """Megatron's own attention with our linear as its ``linear_qkv``, factors filled."""
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_xorl.layers.qkv import FusedQKVLinear

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        kv_channels=HEAD,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
    )
    block = (case.block, case.block) if case.block else None
    module = SelfAttention(
        config,
        SelfAttentionSubmodules(
            linear_qkv=partial(FusedQKVLinear, block=block),
            core_attention=lambda **_: nn.Identity(),
            linear_proj=lambda *_, **__: nn.Identity(),
        ),
        layer_number=1,
    )
    linear = module.linear_qkv
    held, _ = weights(case)
    scales = {leaf: held[f"{leaf} scales"] for leaf in LEAVES} if case.block else None
    linear.set_projections({leaf: held[leaf] for leaf in LEAVES}, scales)
    adapter = AdapterConfig(rank={"attention": RANK, "default": 1}, alpha=ALPHA)
    linear.adapt(PREFIX, adapter, case.leaves)
    fill(module)
    return module


def fill(module: Any) -> None:
    from megatron_xorl.layers.attach import named_factors

    with torch.no_grad():
        for name, (factor, piece, parameter) in named_factors(module).items():
            parameter.copy_(piece.of(random_like(name, factor.shape)))


def run(module: Any, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Megatron's split of this rank's output, input gradient and the gradient pieces of the factors."""
    from megatron_xorl.layers.attach import named_factors

    x = draw("x", LENGTH, BATCH, HIDDEN).chunk(world)[rank].clone().requires_grad_()
    found = dict(zip(LEAVES, module.get_query_key_value_tensors(x), strict=True))
    full = {leaf: (*part.shape[:2], part.shape[2] * world, HEAD) for leaf, part in found.items()}
    grads = [draw(f"d{leaf}", *full[leaf]).chunk(world, dim=2)[rank] for leaf in found]
    torch.autograd.backward(list(found.values()), grads)
    pieces = {
        name: (piece.ranges, parameter.grad.clone(), factor.shape)
        for name, (factor, piece, parameter) in named_factors(module).items()
    }
    outputs = {leaf: part.detach().clone() for leaf, part in found.items()}
    return {"outputs": outputs, "x": x.grad, "factors": pieces}


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Outputs joined over heads, input gradients over the sequence, factor gradients summed in place."""
    full = {leaf: torch.cat([one["outputs"][leaf] for one in ranks], dim=2) for leaf in LEAVES}
    full["x"] = torch.cat([one["x"] for one in ranks])
    for one in ranks:
        for name, (ranges, part, shape) in one["factors"].items():
            place = tuple(slice(a, b) for a, b in ranges)
            full.setdefault(name, torch.zeros(shape))[place] += part
    return full


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(relative(found[name], value) for name, value in expected.items())


def on_a_rank(case: Case) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(tp=2)
    return run(attention(case, tp=2), dist.get_rank(), 2)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (6, 3), (4, 4), (4, 1)])
def test_a_fused_weight_computes_what_three_adapted_linears_do(
    heads: int, groups: int, block: int | None
) -> None:
    use_one_process()
    case = Case(heads, groups, block=block)
    assert apart(whole([run(attention(case))]), by_peft(case)) <= LIMIT


@pytest.mark.parametrize("leaves", SUBSETS[:-1], ids="+".join)
def test_any_subset_of_the_projections_can_be_adapted(leaves: tuple[str, ...]) -> None:
    use_one_process()
    case = Case(6, 2, leaves)
    assert apart(whole([run(attention(case))]), by_peft(case)) <= LIMIT


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case(6, 2), Case(8, 4, ("q_proj", "v_proj"), 16)])
def test_two_tensor_ranks_hold_whole_groups(case: Case) -> None:
    assert apart(whole(run_world(on_a_rank, 2, case)), by_peft(case)) <= LIMIT


def test_an_fp8_base_holds_the_bytes_of_the_checkpoint() -> None:
    use_one_process()
    case = Case(6, 2, block=16)
    linear = attention(case).linear_qkv
    held, _ = weights(case)
    for leaf in LEAVES:
        codes = torch.cat([linear.base.codes[rows] for rows in linear.rows_of(leaf)])
        assert torch.equal(codes, held[leaf].view(torch.uint8))
        grid = [slice(rows.start // 16, rows.stop // 16) for rows in linear.rows_of(leaf)]
        scales = torch.cat([linear.base.scales[rows] for rows in grid])
        assert torch.equal(scales, held[f"{leaf} scales"])


# --- seen when wrong ----------------------------------------------------------------------------------------------------


def stacked(module: Any, held: dict[str, Tensor]) -> None:
    module.linear_qkv.base.set_dense(torch.cat([held[leaf] for leaf in LEAVES]))


def exchanged(module: Any, held: dict[str, Tensor]) -> None:
    module.linear_qkv.set_projections(
        {"q_proj": held["q_proj"], "k_proj": held["v_proj"], "v_proj": held["k_proj"]}
    )


def stacked_factors(module: Any, held: dict[str, Tensor]) -> None:
    linear = module.linear_qkv
    type(linear).set_slots(linear, LEAVES, [held[leaf].shape[0] for leaf in LEAVES])
    linear.rows_of = lambda leaf: (linear.slots[leaf],)


@pytest.mark.parametrize("damage", [stacked, exchanged, stacked_factors])
def test_rows_in_another_order_and_k_for_v_are_seen(damage: Any) -> None:
    use_one_process()
    case = Case(6, 2)
    module = attention(case)
    damage(module, weights(case)[0])
    assert apart(whole([run(module)]), by_peft(case)) > 0.1


# --- the other ways to hold three projections ---------------------------------------------------------------------------


def test_projections_stacked_in_unequal_parts_are_slots_of_a_plain_linear() -> None:
    use_one_process()
    from megatron_xorl.layers.linear import ColumnParallelLinear

    case = Case(6, 2, ("q_proj", "v_proj"))
    module, held = attention(case), weights(case)[0]
    sizes = [held[leaf].shape[0] for leaf in LEAVES]
    plain = ColumnParallelLinear(HIDDEN, sum(sizes), config=module.config, block=None)
    plain.base.set_dense(torch.cat([held[leaf] for leaf in LEAVES]))
    plain.set_slots(LEAVES, sizes)
    for leaf, pair in module.linear_qkv.adapters.items():
        plain.attach(leaf, pair)
    parts = plain(draw("x", LENGTH, BATCH, HIDDEN))[0].split(sizes, dim=-1)
    expected = by_peft(case)
    for leaf, part in zip(LEAVES, parts, strict=True):
        assert relative(part.detach(), expected[leaf].flatten(2)) <= LIMIT
    with pytest.raises(AdapterError, match="160 in all"):
        plain.set_slots(LEAVES, [96, 32, 16])


def test_an_unfused_linear_computes_the_same_with_the_same_factors() -> None:
    use_one_process()
    from megatron_xorl.layers.unfuse import unfuse

    case = Case(6, 2, ("q_proj", "k_proj"))
    module = attention(case)
    linear = module.linear_qkv
    module.linear_qkv = unfuse(linear)
    assert [tuple(one.base.shape) for one in module.linear_qkv.projections.values()] == [
        (96, HIDDEN),
        (32, HIDDEN),
        (32, HIDDEN),
    ]
    linear.base.dense.zero_()  # its rows were copied
    assert apart(whole([run(module)]), by_peft(case)) <= LIMIT


def test_what_cannot_be_unfused_is_refused() -> None:
    use_one_process()
    from megatron_xorl.layers.unfuse import unfuse

    with pytest.raises(AdapterError, match="bytes and block grid stay the checkpoint's"):
        unfuse(attention(Case(6, 2, block=16)).linear_qkv)
    split = unfuse(attention(Case(6, 2)).linear_qkv)
    for one in (split.projections["q_proj"], nn.Linear(2, 2)):
        with pytest.raises(AdapterError, match="is no fused linear"):
            unfuse(one)


@pytest.mark.parametrize("block", [None, 16])
def test_a_fused_weight_is_merged_row_by_row_and_restored(block: int | None) -> None:
    use_one_process()
    from megatron_xorl.layers.merge import merge_adapters, unmerge_adapters

    case = Case(6, 3, ("q_proj", "v_proj"), block)
    module = attention(case)
    linear, x = module.linear_qkv, draw("x", LENGTH, BATCH, HIDDEN)
    before = {name: value.clone() for name, value in linear.base.named_buffers()}
    with torch.no_grad():
        adapted = linear(x)[0]
        report = merge_adapters(module, requantize=block is not None)
        assert relative(linear(x)[0], adapted) <= (LIMIT if block is None else 0.05)
    assert report.targets.keys() == {f"{PREFIX}.q_proj", f"{PREFIX}.v_proj"}
    for rows in linear.rows_of("k_proj"):
        held = linear.base.dense if block is None else linear.base.codes
        assert torch.equal(held[rows], before["dense" if block is None else "codes"][rows])
    unmerge_adapters(module)
    assert all(torch.equal(value, before[name]) for name, value in linear.base.named_buffers())


# --- refused ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    use_one_process()
    from megatron_xorl.layers.qkv import FusedQKVLinear

    linear = attention(Case(6, 2, ("q_proj",))).linear_qkv
    config, rows = linear.config, linear.base.shape[0]
    with pytest.raises(LayoutError, match="has 160 rows, 144 were asked for"):
        FusedQKVLinear(HIDDEN, 144, config=config, block=None)
    with pytest.raises(LayoutError, match="a bias was asked for"):
        FusedQKVLinear(HIDDEN, rows, config=config, block=None, bias=True)
    with pytest.raises(FormatError, match="blocks have 32 rows and a head has 16"):
        FusedQKVLinear(HIDDEN, rows, config=config, block=(32, 32))
    with pytest.raises(AdapterError, match=r"q_proj carries factors already"):
        linear.adapt(PREFIX, AdapterConfig(rank=2, alpha=2), ["q_proj"])
    with pytest.raises(AdapterError, match=r"o_proj is no projection"):
        linear.adapt(PREFIX, AdapterConfig(rank=2, alpha=2), ["o_proj"])
    held, _ = weights(Case(6, 2))
    with pytest.raises(AdapterError, match=r"k_proj is missing"):
        linear.set_projections({"q_proj": held["q_proj"]})
    with pytest.raises(FormatError, match="block=None"):
        linear.set_projections({leaf: held[leaf] for leaf in LEAVES}, held)
