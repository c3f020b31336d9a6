"""Head and cross-entropy in chunks: the losses and gradients of whole logits, in less memory, the vocabulary cut or not.

The oracle is ``torch.nn.functional.cross_entropy`` on whole logits in fp64. 1e-6 relative is the design's limit for fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import DataError
from tests.training.comparison import relative
from tests.training.harness import randomise, use_one_process
from tests.worlds import run_world

LIMIT = 1e-6
LENGTH, BATCH, HIDDEN, VOCABULARY, RANK, SCALE = 14, 2, 32, 90, 3, 2.5
FACTORS = ("hidden", "lora_A", "lora_B")


class Case(NamedTuple):
    """Everything in full: hidden ``[s, b, H]``, labels and the gradient of the losses ``[b, s]``."""

    hidden: Tensor
    weight: Tensor
    lora_A: Tensor
    lora_B: Tensor
    labels: Tensor
    grad: Tensor


def _case(size: float = 1.0, ignored: str = "some", dtype: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(29)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, 0], labels[1, -1] = 0, VOCABULARY - 1
    if ignored != "none":
        labels[0, 3:8] = labels[1, :2] = -100
    if ignored == "all":
        labels[:] = -100
    tensors = (
        size * draw(LENGTH, BATCH, HIDDEN),
        draw(VOCABULARY, HIDDEN) / HIDDEN**0.5,
        draw(RANK, HIDDEN) / HIDDEN**0.5,
        draw(VOCABULARY, RANK) / RANK**0.5,
    )
    return Case(*(t.to(dtype) for t in tensors), labels, draw(BATCH, LENGTH))


def _whole(case: Case) -> dict[str, Tensor]:
    """Whole logits in fp64, torch's cross-entropy, gradients by autograd."""
    hidden, a, b = (getattr(case, name).double().requires_grad_() for name in FACTORS)
    logits = hidden @ (case.weight.double() + SCALE * b @ a).t()
    losses = F.cross_entropy(
        logits.transpose(0, 1).flatten(0, 1), case.labels.flatten(), reduction="none"
    ).view_as(case.labels)
    losses.backward(case.grad.double())
    return {"losses": losses.detach(), "hidden": hidden.grad, "lora_A": a.grad, "lora_B": b.grad}


def _pair(case: Case, tp: tuple[int, int]) -> Any:
    from megatron_xorl.layers.lora import FactorSlice, LoraPair

    pieces = []
    for side, full in (("A", case.lora_A), ("B", case.lora_B)):
        factor = Factor(
            name=f"lm_head.lora_{side}", target="lm_head", region="lm_head", side=side, shape=tuple(full.shape),
            dtype="float32", trainable=True, shared=False, tp_axis=None if side == "A" else 0, ep_axis=None, rank=RANK,
        )  # fmt: skip
        pieces.append(FactorSlice(factor, tp=tp, ep=(0, 1)))
    pair = LoraPair(*pieces, scale=SCALE, dtype=case.hidden.dtype, device="cpu", seed=0)
    with torch.no_grad():
        pair.lora_A.copy_(pieces[0].of(case.lora_A))
        pair.lora_B.copy_(pieces[1].of(case.lora_B))
    return pair


def _head(case: Case, tokens: int, adapted: bool = True) -> Any:
    """This rank's head, ``tokens`` a chunk."""
    from megatron.core import parallel_state

    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.layers.head import Head
    from megatron_xorl.specs import transformer_config

    config = transformer_config(load_glm_config("tiny"), dtype=case.hidden.dtype)
    head = Head(HIDDEN, VOCABULARY, config=config, block=None)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), head.tp_group.size()
    head.base.set_dense(case.weight.chunk(size)[rank])
    if adapted:
        head.set_slots(("lm_head",))
        head.attach("lm_head", _pair(case, (rank, size)))
    head.chunk_bytes = tokens * (VOCABULARY // size) * 4
    return head


def _chunked(case: Case, tokens: int) -> dict[str, Any]:
    """This rank's losses and gradients."""
    head = _head(case, tokens)
    size = head.tp_group.size()
    hidden = case.hidden.chunk(size)[head.tp_group.rank()].clone().requires_grad_()
    losses = head.losses(hidden, case.labels)
    losses.backward(case.grad)
    pair = head.adapters["lm_head"]
    return {
        "losses": losses.detach(),
        "hidden": hidden.grad,
        "lora_A": pair.lora_A.grad,
        "lora_B": pair.lora_B.grad,
    }


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((relative(found[name], value), name) for name, value in expected.items())


# ---- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["some", "none"])
@pytest.mark.parametrize("tokens", [1, 4, 7, 20, 21, 22, 1000])
def test_chunks_of_any_size_equal_whole_logits_in_fp64(tokens: int, ignored: str) -> None:
    use_one_process()
    case = _case(ignored=ignored)
    found = _chunked(case, tokens)
    assert found["losses"].dtype == torch.float32 and found["losses"].is_contiguous()
    assert _apart(found, _whole(case))[0] <= LIMIT


def test_fp64_is_exact_and_logits_of_a_thousand_do_not_overflow() -> None:
    use_one_process()
    assert (
        _apart(_chunked(_case(dtype=torch.float64), 4), _whole(_case()))[0] <= 1e-7
    )  # fp32 inputs
    large = _case(size=1000.0)
    expected = _whole(large)
    assert expected["losses"].max() > 1000
    assert (
        _apart(_chunked(large, 4), expected)[0] <= 1e-5
    )  # of logits 1000 times as large, absolute errors are too


def test_bf16_differs_by_the_rounding_of_its_logits_and_of_their_gradient() -> None:
    use_one_process()
    case = _case(dtype=torch.bfloat16)
    expected = _whole(case)
    found = _chunked(case, 4)
    assert found["losses"].dtype == torch.float32 and found["lora_B"].dtype == torch.bfloat16
    logits = (
        case.hidden.double() @ (case.weight.double() + SCALE * case.lora_B.double() @ case.lora_A.double()).t()
    )  # fmt: skip
    # Base product, t and the sum are rounded once each (2^-9 relative); a loss is the difference of two such logits.
    assert (found["losses"] - expected["losses"]).abs().max() <= 2 * 3 * 2**-9 * logits.abs().max()
    # A gradient sums products of factors that carry a few roundings of 2^-9 each, and exp() of the logits' errors.
    assert _apart(found, expected)[0] <= 2**-5


def test_without_an_adapter_and_with_a_zero_one_the_losses_have_the_same_bits() -> None:
    use_one_process()
    for dtype in (torch.float32, torch.bfloat16):
        case = _case(dtype=dtype)
        case = case._replace(lora_B=torch.zeros_like(case.lora_B))
        bare, zero = (
            _head(case, 4, adapted).losses(case.hidden, case.labels) for adapted in (False, True)
        )
        assert torch.equal(bare, zero)


def test_ignored_labels_and_tokens_without_a_gradient_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_xorl.layers import loss

    use_one_process()
    case, real, seen = _case(), loss.frozen_linear, []

    def watched(x: Tensor, weight: Any) -> Tensor:
        seen.append(x.shape[0])
        return real(x, weight)

    monkeypatch.setattr(loss, "frozen_linear", watched)
    _chunked(case, 4)
    trained = int((case.labels != -100).sum())
    assert trained == 21 and sum(seen) == 2 * trained and max(seen) == 4
    case.grad[:, ::2] = 0
    seen.clear()
    assert _apart(_chunked(case, 4), _whole(case))[0] <= LIMIT
    left = int(((case.labels != -100) & (case.grad != 0)).sum())
    assert sum(seen) == trained + left < 2 * trained


def test_a_loss_mask_leaves_out_what_an_ignored_label_would() -> None:
    use_one_process()
    case = _case(ignored="none")
    mask = (_case().labels != -100).float()
    found = _head(case, 4).losses(case.hidden, case.labels, mask)
    assert torch.equal(found, _head(case, 4).losses(case.hidden, _case().labels))


def test_a_microbatch_without_a_trained_token_has_zero_loss_and_zero_gradients() -> None:
    use_one_process()
    case = _case(ignored="all")
    found = _chunked(case, 4)
    assert all(not value.count_nonzero() for value in found.values())
    assert found["hidden"].shape == case.hidden.shape and found["lora_B"].shape == (90, 3)


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_a_label_outside_the_vocabulary_is_refused(wrong: int) -> None:
    use_one_process()
    case = _case()
    case.labels[1, 4] = wrong
    with pytest.raises(DataError, match=r"labels hold tokens .* expected 0 to 89"):
        _chunked(case, 4)


def test_no_logits_are_kept_for_backward() -> None:
    use_one_process()
    case, kept = _case(ignored="none"), []
    head = _head(case, 4)
    hidden = case.hidden.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        head.losses(hidden, case.labels)
    tokens = LENGTH * BATCH
    own = {factor.data_ptr() for factor in head.parameters()}
    sizes = {t.data_ptr(): t.numel() for t in kept if t.data_ptr() not in own}
    # Places of the tokens, their labels, log-sum-exps and losses, and the hidden rows.
    assert sorted(sizes.values()) == [tokens] * 4 + [tokens * HIDDEN]


# ---- through the model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Any:
    use_one_process()
    from megatron_xorl.training.model import load_model

    loaded = load_model(tiny_dir, AdapterConfig(rank=4, alpha=8, lora_target_modules=["lm_head"]))
    randomise(loaded)
    return loaded


def test_a_model_given_labels_computes_no_whole_logits_and_without_them_it_does(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.training.model import forward_logits

    ids = torch.randint(0, 256, (2, 41), generator=torch.Generator().manual_seed(3))
    tokens, labels, positions = ids[:, :-1], ids[:, 1:].clone(), torch.arange(40).expand(2, 40)
    labels[:, :30] = -100
    logits = forward_logits(model, tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
        labels
    )
    with monkeypatch.context() as patch:
        patch.setattr(type(model.output_layer), "forward", None)
        found = model(tokens, positions, None, labels=labels)
        assert torch.equal(found, model(tokens, positions, None, None, labels))
        masked = model(tokens, positions, None, labels=ids[:, 1:], loss_mask=labels != -100)
    assert found.shape == (2, 40) and found.dtype == torch.float32
    assert relative(found, expected) <= LIMIT and torch.equal(masked, found)
    mine = model(tokens, positions, None, labels=labels, output_processor=lambda **named: named["labels"])  # fmt: skip
    assert mine is labels


def test_data_and_head_agree_on_the_ignored_label() -> None:
    from megatron_xorl.layers import head
    from megatron_xorl.training import data

    assert head.IGNORED == data.IGNORED == F.cross_entropy.__defaults__[2]


# ---- two processes --------------------------------------------------------------------------------


def _keep_own_maximum(group: Any) -> None:
    from megatron_xorl.layers import loss

    real = dist.all_reduce

    def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        return None if op == dist.ReduceOp.MAX else real(tensor, op=op, group=group)

    loss.dist.all_reduce = reduce


def _on_a_rank(case: Case, tokens: int, fault: bool = False) -> dict[str, Any]:
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(tp=2)
    if fault:
        _keep_own_maximum(None)
    return _chunked(case, tokens)


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The sequence and B's rows put together; A's gradient as Megatron sums it over the tensor group."""
    assert torch.equal(ranks[0]["losses"], ranks[1]["losses"])
    return {
        "losses": ranks[0]["losses"],
        "hidden": torch.cat([rank["hidden"] for rank in ranks]),
        "lora_A": sum(rank["lora_A"] for rank in ranks),
        "lora_B": torch.cat([rank["lora_B"] for rank in ranks]),
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "limit"), [(1.0, LIMIT), (1000.0, 1e-5)], ids=["small", "large logits"]
)
def test_a_cut_vocabulary_gives_the_whole_one_s_losses_and_gradients(
    size: float, limit: float
) -> None:
    case = _case(size)
    found = _joined(run_world(_on_a_rank, 2, case, 4))
    assert _apart(found, _whole(case))[0] <= limit


@pytest.mark.dist
def test_ranks_without_a_trained_token_do_not_wait_for_each_other() -> None:
    found = _joined(run_world(_on_a_rank, 2, _case(ignored="all"), 4))
    assert all(not value.count_nonzero() for value in found.values())


# ---- the comparison sees mistakes -----------------------------------------------------------------


@pytest.mark.dist
def test_a_maximum_that_is_not_reduced_over_the_ranks_is_seen() -> None:
    case = _case()
    with pytest.raises(AssertionError):
        assert (
            _apart(_joined(run_world(_on_a_rank, 2, case, 4, fault=True)), _whole(case))[0] <= LIMIT
        )


def test_a_chunk_border_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers import loss

    use_one_process()
    case = _case()
    monkeypatch.setattr(
        loss,
        "range",
        lambda n, *more: range(n, more[0] - 1, *more[1:]) if more else range(n),
        raising=False,
    )
    assert (
        _apart(_chunked(case, 4), _whole(case))[0] > 1000 * LIMIT
    )  # 21 tokens: the last chunk has one


def test_an_ignored_label_that_is_counted_is_seen() -> None:
    use_one_process()
    case = _case()
    counted = case._replace(labels=case.labels.clamp(min=0))
    assert _apart(_chunked(counted, 4), _whole(case))[0] > 1000 * LIMIT
