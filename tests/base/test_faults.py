"""Negative controls of the matrix: break the model in one place, and see which contracts notice.

The faults that one checkpoint is enough for are those of ``tests/layers/test_parity_faults.py``; here they meet the
matrix, and the printed table (``pytest -rP``) says for each which contracts catch it. A fault must be caught by the
contract named beside it, and the untouched model by none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_xorl.errors import WeightsError
from tests.base.bench import Bench, Case
from tests.base.contracts import CONTRACTS
from tests.base.subject import Subject
from tests.base.variants import VARIANTS, WEIGHTS, write_variant
from tests.layers import test_parity_faults as faults

CASE = Case("5.2-like", "unit gain", "above", 3)
WATCHED = [
    contract
    for contract in CONTRACTS
    if contract.where(CASE) and not contract.costly and contract.name != "prefix"
]
"""What one forward of the fp32 model shows."""

Fault = Callable[[Any, pytest.MonkeyPatch], None]


def _swapped_epsilons(subject: Subject, patch: pytest.MonkeyPatch) -> None:
    """1e-6 in the decoder's norms, 1e-5 on the latents."""
    from megatron_xorl.layers.norms import RMSNorm

    for module in subject.model.modules():
        if isinstance(module, RMSNorm):
            patch.setattr(module, "eps", 1e-5 if module.eps == 1e-6 else 1e-6)


def _top_weights_not_normalised(subject: Subject, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.router import GlmRouter

    for _, router in subject.parts(GlmRouter):
        patch.setattr(router, "glm", replace(router.glm, norm_topk_prob=False))


def _bias_left_out(subject: Subject, patch: pytest.MonkeyPatch) -> None:
    """The correction bias takes no part in the choice."""
    from megatron_xorl.layers.router import GlmRouter

    for _, router in subject.parts(GlmRouter):
        patch.setitem(router._buffers, "expert_bias", torch.zeros_like(router.expert_bias))


def _one_scale_off(subject: Subject, patch: pytest.MonkeyPatch) -> None:
    """One block of one expert of one layer, by a tenth."""
    from megatron_xorl.layers.experts import BankLinear

    buffers = subject.parts(BankLinear)[-1][1].base._buffers
    scales = buffers["scales"].clone()
    scales[3, 1, 1] *= 1.1
    patch.setitem(buffers, "scales", scales)


def _two_experts_swapped(subject: Subject, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.experts import BankLinear

    bank = subject.parts(BankLinear)[0][1].base
    order = [1, 0, *range(2, bank.shape[0])]
    for name in ("codes", "scales"):
        patch.setitem(bank._buffers, name, bank._buffers[name][order])


FAULTS: dict[str, tuple[Fault, str]] = {
    "half-split rope in the indexer": (faults._half_split_indexer_rope, "index sets"),
    "half-split rope in the attention": (faults._half_split_main_rope, "mean KL"),
    "epsilons of decoder and latents swapped": (_swapped_epsilons, "norm epsilons"),
    "no ReLU in the index score": (faults._no_relu, "index sets"),
    "FP8 scales ignored": (faults._ignored_scales, "weights"),
    "one FP8 scale off by a tenth": (_one_scale_off, "weights"),
    "raw q into the indexer": (faults._raw_q_into_the_indexer, "index sets"),
    "theta of GLM-5.1": (faults._theta_of_glm_5_1, "mean KL"),
    "bias in the mixture weights": (faults._bias_in_the_mixture, "mixture weights"),
    "bias left out of the choice": (_bias_left_out, "route sets"),
    "weights not normalised": (_top_weights_not_normalised, "mixture weights"),
    "selection of another layer": (faults._selection_of_the_wrong_layer, "shared selection"),
    "two experts swapped": (_two_experts_swapped, "weights"),
}


def _caught(sound: Bench) -> list[str]:
    """Contracts that are broken now; what transformers gave is the sound bench's, since some faults patch torch itself."""
    bench = Bench(sound.case, sound.subject, sound.folder)
    bench.theirs, bench.exact = sound.theirs, sound.exact
    found = []
    for contract in WATCHED:
        figure, limit = contract.measure(bench)
        if not figure <= limit:
            found.append(contract.name)
    return found


def test_each_fault_is_caught_by_its_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(
        write_variant(tmp_path / "model", VARIANTS[CASE.variant], WEIGHTS[CASE.weights])
    )
    sound = Bench(CASE, subject, tmp_path)
    assert _caught(sound) == []
    missed = []
    for name, (fault, expected) in FAULTS.items():
        with monkeypatch.context() as patch:
            fault(subject, patch)
            caught = _caught(sound)
        print(f"{name:40s}  {', '.join(caught)}")
        missed += [] if expected in caught else [name]
    assert missed == []
    assert _caught(sound) == []  # the faults are gone again


def test_offset_two_for_three_is_another_schedule_and_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.config import indexer

    directory = write_variant(tmp_path / "model", VARIANTS["5.2-like"], WEIGHTS["unit gain"])
    assert Subject(directory).glm.full_indexer_layers == (0, 1, 2, 6)
    real = indexer._count

    def without_the_key(raw: Any, key: str, default: int, *rest: Any, **named: Any) -> int:
        kept = {k: v for k, v in raw.items() if k != "index_skip_topk_offset"}
        return real(kept, key, default, *rest, **named)

    monkeypatch.setattr(indexer, "_count", without_the_key)
    wrong = Subject(directory)
    assert wrong.glm.full_indexer_layers == (0, 1, 5)
    with pytest.raises(WeightsError) as caught:
        wrong.loaded(torch.float32)
    message = str(caught.value)
    assert "model.layers.5.self_attn.indexer" in message and "is missing" in message
    assert "model.layers.2.self_attn.indexer" in message and "shares another layer's" in message


@pytest.mark.parametrize("length", ["below", "at"])
def test_up_to_index_topk_tokens_no_fault_of_the_indexer_can_show(
    length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Why the matrix has batches above index_topk: a suite of short sequences is blind.
    subject = Subject(
        write_variant(tmp_path / "model", VARIANTS[CASE.variant], WEIGHTS[CASE.weights])
    )
    bench = Bench(replace(CASE, length=length), subject, tmp_path)
    before = bench.ours
    faults._half_split_indexer_rope(subject, monkeypatch)
    after = Bench(bench.case, subject, tmp_path).ours
    assert torch.equal(after.logits, before.logits)
