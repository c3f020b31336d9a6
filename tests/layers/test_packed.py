"""Documents packed into one row: each gives the logits and the gradients it gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import DataError
from tests.layers.parity_case import ParityCase, token_ids
from tests.training.comparison import relative
from tests.training.harness import randomise, use_one_process

LIMIT = 1e-6
"""Relative to the size of what is compared: the noise of fp32 products of another shape."""

ROWS = {
    # index_topk is 32
    "all longer than topk": [45, 37, 50],
    "one shorter than topk": [45, 9, 40],
    "documents of one token": [1, 40, 1, 1, 39],
    "together no longer than topk": [5, 12, 3],
    "one document": [70],
}


@pytest.fixture(scope="module")
def adapted(tiny_dir: Path) -> Any:
    """The tiny model with random factors everywhere."""
    use_one_process()
    from megatron_xorl.training.model import load_model

    model = load_model(tiny_dir, AdapterConfig(rank=4, alpha=8))
    randomise(model)
    return model


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def _losses(model: Any, row: Tensor, labels: Tensor, bounds: Tensor | None) -> Tensor:
    """Per-token losses ``[s]`` of one row."""
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = None
    if bounds is not None:
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    places = torch.arange(row.shape[1]).unsqueeze(0)
    losses: Tensor = model(row, places, None, labels=labels, packed_seq_params=packed)[0]
    return losses


def _gradients(model: Any, losses: Tensor) -> dict[str, Tensor]:
    from megatron_xorl.layers.attach import named_factors

    model.zero_grad()
    losses.sum().backward()
    return {name: p.grad.clone() for name, (_, _, p) in named_factors(model).items()}


def _joined(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("row", ROWS)
def test_packed_documents_give_the_logits_they_give_alone(case: ParityCase, row: str) -> None:
    lengths = ROWS[row]
    ids = token_ids(1, sum(lengths))
    alone = torch.cat([case.logits(part) for part in ids.split(lengths, dim=1)], dim=1)
    packed = case.logits(ids, cu_seqlens=_bounds(lengths))
    worst = relative(packed, alone)
    print(f"{row}: {worst:.1e}, max-abs {(packed - alone).abs().max():.1e}")
    assert worst <= LIMIT
    if len(lengths) > 1:
        assert relative(case.logits(ids), alone) > 1e-2  # as one document they differ


def test_a_padded_tail_changes_nothing_before_it(case: ParityCase) -> None:
    lengths = [45, 9, 40]
    ids = token_ids(1, sum(lengths) + 30)
    alone = [case.logits(part) for part in ids[:, : sum(lengths)].split(lengths, dim=1)]
    packed = case.logits(ids, cu_seqlens=_bounds(lengths))[:, : sum(lengths)]
    assert relative(packed, torch.cat(alone, dim=1)) <= LIMIT


@pytest.mark.parametrize("row", ["one shorter than topk", "documents of one token"])
def test_gradients_of_a_packed_row_are_the_sum_of_its_documents_gradients(
    adapted: Any, row: str
) -> None:
    lengths = ROWS[row]
    ids, labels = token_ids(1, sum(lengths)), token_ids(1, sum(lengths), seed=4)
    packed = _gradients(adapted, _losses(adapted, ids, labels, _bounds(lengths)))
    total: dict[str, Tensor] = {}
    for part, label in zip(ids.split(lengths, 1), labels.split(lengths, 1), strict=True):
        for name, gradient in _gradients(adapted, _losses(adapted, part, label, None)).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    assert len(packed) == 84
    together = relative(_joined(packed), _joined(total))
    worst = max((relative(packed[name], total[name]), name) for name in packed)
    print(f"{row}: all factors {together:.1e}, worst {worst[0]:.1e} {worst[1]}")
    # The whole gradient to the noise; a single factor's, a small part of it, to what layouts are held to.
    assert together <= LIMIT and worst[0] <= 1e-5
    whole = _gradients(adapted, _losses(adapted, ids, labels, None))
    assert relative(_joined(whole), _joined(total)) > 1e-2


def test_a_document_that_repeats_the_first_has_the_loss_it_has_alone(adapted: Any) -> None:
    document, labels = token_ids(1, 50), token_ids(1, 50, seed=4)
    with torch.no_grad():
        alone = _losses(adapted, document, labels, None)
        twice = [torch.cat([t, t], dim=1) for t in (document, labels)]
        packed = _losses(adapted, *twice, _bounds([50, 50]))
        leaking = _losses(adapted, *twice, None)
    assert relative(packed[50:], alone) <= LIMIT and relative(packed[:50], alone) <= LIMIT
    assert relative(leaking[50:], alone) > 1e-2  # what it would be if it saw the first


def test_no_layer_selects_a_key_of_another_document(case: ParityCase) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention

    lengths = [45, 9, 1, 40]
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    used: dict[int, Tensor] = {}
    hooks = [
        attention.register_forward_hook(lambda _, __, out, n=layer: used.update({n: out[1]}))
        for layer, attention in case.parts(SparseLatentAttention)
    ]
    case.logits(token_ids(1, sum(lengths)), cu_seqlens=_bounds(lengths))
    for hook in hooks:
        hook.remove()
    assert sorted(used) == [0, 1, 2, 3]  # full and shared layers alike
    places = torch.arange(sum(lengths))
    for layer, selected in used.items():
        chosen = selected[:, 0].long()
        free = chosen < 0
        assert ((document[chosen] == document[:, None]) | free).all(), layer
        assert ((chosen <= places[:, None]) | free).all(), layer
        start = torch.tensor([0, *lengths[:-1]]).cumsum(0)[document]
        assert torch.equal((~free).sum(-1), (places - start + 1).clamp(max=32)), layer


BOUNDS: dict[str, Any] = {
    "no document": torch.tensor([0]),
    "not from zero": torch.tensor([1, 10]),
    "falling": torch.tensor([0, 7, 3]),
    "beyond the row": torch.tensor([0, 11]),
    "nothing in them": torch.tensor([0, 0]),
    "negative": torch.tensor([0, -4, 10]),
    "floats": torch.tensor([0.0, 5.5, 10.0]),
    "flags": torch.tensor([False, True]),
    "one number": torch.tensor(10),
    "empty": torch.tensor([], dtype=torch.int64),
    "a list": [0, 10],
}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_bounds_that_are_not_documents_of_the_row_are_refused(
    case: ParityCase, bounds: str
) -> None:
    with pytest.raises(DataError, match=r"cu_seqlens_q is .*row of 10 tokens"):
        case.logits(token_ids(1, 10), cu_seqlens=BOUNDS[bounds])


def test_packing_in_a_batch_of_two_rows_is_refused(case: ParityCase) -> None:
    with pytest.raises(DataError, match="2 rows"):
        case.logits(token_ids(2, 10), cu_seqlens=torch.tensor([0, 10]))


def test_an_empty_document_at_the_end_of_the_bounds_changes_nothing(case: ParityCase) -> None:
    # Bounds are often kept at one length by repeating the last.
    ids = token_ids(1, 60)
    plain = case.logits(ids, cu_seqlens=torch.tensor([0, 40, 60]))
    assert torch.equal(case.logits(ids, cu_seqlens=torch.tensor([0, 40, 60, 60])), plain)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"qkv_format": "sbhd"}, "'sbhd'"),
        ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, "cu_seqlens_q is None"),
        ({"cu_seqlens_kv": torch.tensor([0, 6, 10])}, "differs from cu_seqlens_q"),
        ({"cu_seqlens_q_padded": torch.tensor([1, 5, 10])}, "cu_seqlens_q_padded is"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 3, 10])}, "too little room"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 10])}, "too little room"),
    ],
    ids=str,
)
def test_packing_parameters_of_a_launch_script_are_held_to_the_same(
    case: ParityCase, params: dict[str, Any], says: str
) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, 5, 10])
    given = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds} | params
    with pytest.raises(DataError, match=says):
        case.model(token_ids(1, 10), None, None, packed_seq_params=PackedSeqParams(**given))


def test_documents_padded_one_by_one_give_the_logits_they_give_alone(case: ParityCase) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths, room = [45, 9, 40], [48, 12, 44]
    ids = token_ids(1, sum(room))
    parts = [part[:, :n] for part, n in zip(ids.split(room, dim=1), lengths, strict=True)]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=_bounds(lengths), cu_seqlens_q_padded=_bounds(room)
    )
    with torch.no_grad():
        logits = case.model(ids, None, None, packed_seq_params=packed).float()
    for part, found, n in zip(parts, logits.split(room, dim=1), lengths, strict=True):
        assert relative(found[:, :n], case.logits(part)) <= LIMIT
