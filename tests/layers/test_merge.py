"""Merging into the base and back: the forward, the bytes, what an FP8 base loses, and what is refused meanwhile.

1e-5 is the design's limit for an adapter against a merge by hand in fp32. The oracle of the bytes is the sum in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_xorl.errors import AdapterError
from tests.layers.dense import dense_weight, held_bytes, load, logits_of, tokens
from tests.training.harness import use_one_process
from tests.worlds import run_world

LIMIT = 1e-5


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> Any:
    use_one_process()
    return load(tiny_dir)


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """On dense fp32 weights, not merged before the test nor after it."""
    from megatron_xorl.layers.merge import unmerge_adapters
    from megatron_xorl.layers.switch import hosts_of

    yield loaded
    if any(host.merged for host in hosts_of(loaded)):
        unmerge_adapters(loaded)
    assert not any(host.aside or host.original for host in hosts_of(loaded))


def exact_sums(model: Any) -> dict[str, tuple[Tensor, Tensor, Any, slice]]:
    """``{target: (W in fp64, scale B A in fp64, its host, its rows)}``, by the definition, the whole tensor at once."""
    from megatron_xorl.layers.switch import hosts_of

    found = {}
    for host in hosts_of(model):
        for leaf, pair in host.adapters.items():
            delta = pair.scale * pair.lora_B.detach().double() @ pair.lora_A.detach().double()
            rows = host.slots[leaf]
            weight = dense_weight(host.base).double()[..., rows, :]
            found[pair.target] = (weight, delta.expand_as(weight), host, rows)
    return found


# --- dense bases ------------------------------------------------------------------------------------------------------


def test_the_merged_forward_is_the_adapted_one_and_unmerging_restores_the_bytes(model: Any) -> None:
    import megatron_xorl as mx

    before, adapted = held_bytes(model), logits_of(model)
    sums = exact_sums(model)
    report = mx.merge_adapters(model)
    assert report.targets.keys() == sums.keys() == set(model.inventory.targets)
    assert (logits_of(model) - adapted).abs().max() <= LIMIT
    for weight, delta, host, rows in sums.values():
        held = dense_weight(host.base)[..., rows, :].double()
        assert (held - weight - delta).norm() <= 2e-7 * (weight + delta).norm()
    mx.unmerge_adapters(model)
    after = held_bytes(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(logits_of(model), adapted)


def test_adapters_that_are_merged_and_added_again_are_seen(model: Any) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.switch import hosts_of

    adapted = logits_of(model)
    mx.merge_adapters(model)
    for host in hosts_of(model):
        host.adapters = host.aside[-1]
    assert (logits_of(model) - adapted).abs().max() > 1000 * LIMIT


def test_bf16_weights_are_the_sum_rounded_once(tiny_dir: Path) -> None:
    """Half a unit in the last of 8 significant bits is at most 2^-8 of a value; the fp32 sum before it adds next to nothing."""
    import megatron_xorl as mx

    use_one_process()
    model = load(tiny_dir, dtype=torch.bfloat16)
    before, sums = held_bytes(model), exact_sums(model)
    report = mx.merge_adapters(model)
    twice = 0
    for target, (weight, delta, host, rows) in sums.items():
        held = dense_weight(host.base)[..., rows, :].double()
        half = torch.exp2(torch.frexp(weight + delta).exponent - 9.0)
        bound = half + 1e-6 * (weight.abs() + delta.abs())
        assert bool(((held - weight - delta).abs() <= bound).all()), target
        error = report.targets[target]
        assert error.max_abs == pytest.approx(float((held - weight - delta).abs().max()), rel=1e-3)
        assert 0 < error.rel_l2 <= 2**-8 < error.of_delta
        rounded = (weight.bfloat16() + delta.bfloat16()).double()
        twice += bool(((rounded - weight - delta).abs() > bound).any())
    assert twice == len(sums)  # rounding B A before the sum is seen everywhere
    mx.unmerge_adapters(model)
    assert all(torch.equal(held_bytes(model)[name], value) for name, value in before.items())


def test_a_pair_that_adds_nothing_keeps_the_bytes(tiny_dir: Path) -> None:
    import megatron_xorl as mx

    use_one_process()
    model = load(tiny_dir, dense=False, lora_target_modules=["*.o_proj", "*.mlp.gate_proj"])
    with torch.no_grad():
        for factor, _, parameter in _factors(model).values():
            if factor.side == "B":
                parameter.zero_()
    before = held_bytes(model)
    report = mx.merge_adapters(model)  # not refused on FP8: nothing is to be rounded
    assert (report.targets, report.kept_bytes) == ({}, 0)
    assert all(torch.equal(held_bytes(model)[name], value) for name, value in before.items())


def _factors(model: Any) -> dict[str, Any]:
    from megatron_xorl.layers.attach import named_factors

    return named_factors(model)


class LargestWide(TorchDispatchMode):
    """Bytes of the largest fp32 or fp64 storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            item.untyped_storage().data_ptr() for item in args if isinstance(item, torch.Tensor)
        }
        for item in out if isinstance(out, tuple | list) else [out]:
            if isinstance(item, torch.Tensor) and item.dtype in (torch.float32, torch.float64):
                storage = item.untyped_storage()
                if storage.data_ptr() not in given:
                    self.largest = max(self.largest, storage.nbytes())
        return out


@pytest.mark.parametrize("dense", [True, False])
def test_nothing_larger_than_a_tile_is_made(
    tiny_dir: Path, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.layers import merge

    use_one_process()
    model = load(
        tiny_dir,
        dense=dense,
        dtype=torch.bfloat16,
        lora_target_modules=["*.mlp.experts.*", "lm_head"],
    )
    monkeypatch.setattr(merge, "SCRATCH_BYTES", 16 * 1024)
    with LargestWide() as made:
        merge.merge_adapters(model, requantize=True, keep_original=False)
    # Padding to whole blocks and the expanded scales of a tile are no larger than the tile here.
    assert 8 * 1024 <= made.largest <= 32 * 1024


# --- FP8 bases --------------------------------------------------------------------------------------------------------


def test_an_fp8_base_is_refused_and_left_as_it_was(tiny_dir: Path) -> None:
    import megatron_xorl as mx

    use_one_process()
    model = load(tiny_dir, dense=False)
    before, adapted = held_bytes(model), logits_of(model)
    with pytest.raises(AdapterError, match=r"block-FP8.*requantize=True"):
        mx.merge_adapters(model)
    assert all(torch.equal(held_bytes(model)[name], value) for name, value in before.items())
    assert torch.equal(logits_of(model), adapted)


def test_requantising_tells_its_error_and_touches_no_other_part(tiny_dir: Path) -> None:
    """e4m3 has 3 bits after the point: a code is off by 2^-4 of a value, or half of 2^-9 below the normal range."""
    import megatron_xorl as mx

    use_one_process()
    model = load(tiny_dir, dense=False, lora_target_modules=["*.gate_proj", "*.o_proj", "lm_head"])
    before, sums = held_bytes(model), exact_sums(model)
    report = mx.merge_adapters(model, requantize=True)
    after = held_bytes(model)
    for target, (weight, delta, host, rows) in sums.items():
        if not host.base.quantized:
            continue
        held = dense_weight(host.base)[..., rows, :].double()
        exact, off = weight + delta, (held - weight - delta).abs()
        assert bool((off <= 2**-4 * exact.abs() + 2**-10 * host.base.scales.max() * 1.001).all())
        error = report.targets[target]
        assert error.max_abs == pytest.approx(float(off.max()), rel=1e-4)
        assert error.rel_l2 == pytest.approx(float(off.norm() / exact.norm()), rel=1e-4)
        assert error.of_delta == pytest.approx(float(off.norm() / delta.norm()), rel=1e-4)
        assert error.rel_l2 > 0.01
    for name, value in before.items():
        if "linear_fc1" in name:  # gate above up, each on a block grid of its own
            half = value.shape[-2] // 2
            assert torch.equal(after[name][..., half:, :], value[..., half:, :]), name
            if name.startswith("decoder.layers.1.mlp.experts"):
                assert not torch.equal(after[name][..., :half, :], value[..., :half, :]), name
        elif "linear_proj" not in name and name != "output_layer.dense":
            assert torch.equal(after[name], value), name
    mx.unmerge_adapters(model)
    restored = held_bytes(model)
    assert all(torch.equal(restored[name], value) for name, value in before.items())


# --- layouts ----------------------------------------------------------------------------------------------------------


def merged_logits(directory: Path, layout: dict[str, int]) -> tuple[Tensor, Tensor, list[bool]]:
    """Adapted and merged logits of a rank. The ranks merge one after the other: whoever communicated would wait for ever."""
    from megatron_xorl.layers.merge import merge_adapters, unmerge_adapters
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(**layout)
    model = load(directory)
    before, adapted = held_bytes(model), logits_of(model)
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            merge_adapters(model)
        dist.barrier()
    merged = logits_of(model)
    unmerge_adapters(model)
    return adapted, merged, [torch.equal(held_bytes(model)[n], v) for n, v in before.items()]


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"tp": 2, "etp": 2}, {"ep": 2}])
def test_every_rank_merges_its_own_part_alone(
    tiny_dir: Path, model: Any, layout: dict[str, int]
) -> None:
    expected = logits_of(model)
    for adapted, merged, restored in run_world(merged_logits, 2, tiny_dir, layout, timeout=180):
        assert (adapted - expected).abs().max() <= LIMIT
        assert (merged - expected).abs().max() <= LIMIT
        assert all(restored)


# --- meanwhile --------------------------------------------------------------------------------------------------------


def train(model: Any) -> None:
    model.train()
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    try:
        model(ids, positions, None, labels=ids)
    finally:
        model.eval()


def disable(model: Any) -> None:
    import megatron_xorl as mx

    with mx.disable_adapters(model):
        pass


REFUSED: dict[str, Callable[[Any, Path], Any]] = {
    "merged again": lambda model, _: __import__("megatron_xorl").merge_adapters(model),
    "trained": lambda model, _: train(model),
    "listed": lambda model, _: __import__("megatron_xorl").trainable_factors(model),
    "exported": lambda model, out: __import__("megatron_xorl").export_adapter(model, out / "a"),
    "streamed": lambda model, _: next(__import__("megatron_xorl").iter_adapter(model)),
    "disabled": lambda model, _: disable(model),
    "switched off": lambda model, _: __import__("megatron_xorl").set_adapter(model, None),
}


@pytest.mark.parametrize("action", REFUSED)
def test_what_is_merged_is_not(action: str, model: Any, tmp_path: Path) -> None:
    import megatron_xorl as mx

    mx.merge_adapters(model)
    merged = logits_of(model)
    with pytest.raises(AdapterError, match="merged into the base"):
        REFUSED[action](model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits_of(model), merged)


def test_losses_of_a_merged_model_are_allowed_in_evaluation(model: Any) -> None:
    import megatron_xorl as mx

    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        expected = model(ids, positions, None, labels=ids)
    mx.merge_adapters(model)
    assert (model(ids, positions, None, labels=ids) - expected).abs().max() <= LIMIT
    mx.unmerge_adapters(model)
    train(model)  # the guard is gone


def test_a_merge_that_kept_nothing_cannot_be_undone(tiny_dir: Path) -> None:
    import megatron_xorl as mx

    use_one_process()
    model = load(tiny_dir, lora_target_modules=["*.o_proj"])
    with pytest.raises(AdapterError, match="nothing is merged"):
        mx.unmerge_adapters(model)
    assert mx.merge_adapters(model, keep_original=False).kept_bytes == 0
    merged = logits_of(model)
    with pytest.raises(AdapterError, match="keep_original=False"):
        mx.unmerge_adapters(model)
    assert torch.equal(logits_of(model), merged)


def test_the_kept_bytes_are_those_of_the_adapted_weights(model: Any) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.switch import hosts_of

    adapted = sum(host.base.nbytes for host in hosts_of(model) if host.adapters)
    assert mx.merge_adapters(model).kept_bytes == adapted


def test_what_is_not_finite_or_not_there_is_not_merged(model: Any) -> None:
    import megatron_xorl as mx
    from megatron_xorl.training.model import load_model

    before = held_bytes(model)
    name, (_, _, parameter) = next(reversed(_factors(model).items()))
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[0] = float("nan")
    with pytest.raises(AdapterError, match=f"{name} holds inf or NaN"):
        mx.merge_adapters(model)
    with torch.no_grad():
        parameter.copy_(kept)
    assert all(torch.equal(held_bytes(model)[n], value) for n, value in before.items())
    with pytest.raises(AdapterError, match="no active adapter to merge"):
        mx.merge_adapters(load_model(model.base_directory))
    with mx.disable_adapters(model), pytest.raises(AdapterError, match="disabled"):
        mx.merge_adapters(model)
