"""The base against transformers' GlmMoeDsa on the dequantised weights, fp32, more tokens than ``index_topk``.

Limits: max-abs logits 1e-5, mean KL 1e-7, index and route sets exactly equal, mixture weights 1e-6. The negative controls are in
``test_parity_faults.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.layers.parity_case import LENGTH, MEAN_KL, ParityCase, agrees, gap, token_ids
from tests.oracle import hf_oracle
from tests.training.harness import index_sets, use_one_process
from tests.worlds import run_world


def test_logits_on_the_small_block_equal_transformers(case: ParityCase) -> None:
    assert case.model.glm_config.index_topk < LENGTH and case.model.glm_config.index_n_heads >= 16
    assert agrees(case.logits(), case.expected)


def test_logits_on_the_shipped_block_equal_transformers(tiny128_dir: Path) -> None:
    use_one_process()
    other = ParityCase(tiny128_dir)
    assert other.model.glm_config.weight_block_size == (128, 128)
    assert agrees(other.logits(), other.expected)


def test_a_bf16_checkpoint_loads_into_the_same_modules_and_equals_its_own_oracle(
    tmp_path: Path, case: ParityCase
) -> None:
    from megatron_xorl.convert.tiny import make_tiny
    from megatron_xorl.fp8.weight import FrozenWeight

    plain = ParityCase(make_tiny(tmp_path / "bf16", block=None))
    assert [name for name, _ in plain.model.named_modules()] == [
        name for name, _ in case.model.named_modules()
    ]
    kinds = [part.quantized for part in plain.model.modules() if isinstance(part, FrozenWeight)]
    assert kinds and not any(kinds)
    assert agrees(plain.logits(), plain.expected)
    assert not agrees(plain.logits(), case.expected)  # the two checkpoints are different models


def test_a_bf16_run_is_as_near_to_the_fp32_oracle_as_transformers_in_bf16(case: ParityCase) -> None:
    # bf16 rounding flips routes and selections in both; the bound is what transformers itself loses, times two.
    from megatron_xorl.training.model import forward_logits, load_model

    half = load_model(case.directory, dtype=torch.bfloat16)
    reference = hf_oracle(case.directory)
    kept = {n: b.clone() for n, b in reference.named_buffers()}  # rope frequencies, router bias
    reference.bfloat16()
    for name, buffer in kept.items():
        parent, _, leaf = name.rpartition(".")
        setattr(reference.get_submodule(parent), leaf, buffer)
    with torch.no_grad():
        _, kl = gap(forward_logits(half, token_ids()), case.expected)
        _, hf = gap(reference(input_ids=token_ids()).logits.float(), case.expected)
    print(f"mean KL to fp32: ours {kl:.2e}, transformers {hf:.2e}")
    assert MEAN_KL < kl <= 2 * hf


def _rank_logits(directory: str, layout: dict[str, int]) -> tuple[Tensor, int]:
    from megatron_xorl.fp8.weight import FrozenWeight
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.model import forward_logits, load_model

    use_cpu()
    initialize(**layout)
    model = load_model(directory)
    held = sum(part.nbytes for part in model.modules() if isinstance(part, FrozenWeight))
    with torch.no_grad():
        return forward_logits(model, token_ids()), held


@pytest.mark.dist
def test_two_processes_with_the_experts_cut_between_them_equal_transformers(
    tiny_dir: Path, case: ParityCase
) -> None:
    from megatron_xorl.fp8.weight import FrozenWeight

    weights = {n: w.nbytes for n, w in case.model.named_modules() if isinstance(w, FrozenWeight)}
    banks = sum(size for name, size in weights.items() if ".mlp.experts." in name)
    for logits, held in run_world(_rank_logits, 2, str(tiny_dir), {"ep": 2}):
        assert agrees(logits, case.expected)
        assert held == sum(weights.values()) - banks // 2


# ---- what the model chooses -----------------------------------------------------------------------


def test_index_sets_of_full_layers_are_transformers_and_shared_layers_use_the_same_tensor(
    case: ParityCase,
) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.indexer import Indexer

    given: dict[int, Tensor | None] = {}
    made: dict[int, Tensor] = {}
    used: dict[int, Tensor] = {}
    hooks = []
    for layer, attention in case.parts(SparseLatentAttention):
        hooks.append(
            attention.register_forward_pre_hook(
                lambda _, __, named, n=layer: given.update({n: named["selected"]}), with_kwargs=True
            )
        )
        hooks.append(
            attention.register_forward_hook(lambda _, __, out, n=layer: used.update({n: out[1]}))
        )
    for layer, indexer in case.parts(Indexer):
        hooks.append(
            indexer.register_forward_hook(lambda _, __, out, n=layer: made.update({n: out}))
        )
    case.logits()
    for hook in hooks:
        hook.remove()
    glm = case.model.glm_config
    assert tuple(made) == glm.full_indexer_layers and tuple(case.hf_selected) == tuple(made)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for layer, selected in made.items():
        hf = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
        hf = hf.scatter(-1, case.hf_selected[layer], True) & causal
        assert torch.equal(index_sets(selected), hf), layer
        assert int(hf.sum(-1).max()) == glm.index_topk
    for layer in glm.shared_indexer_layers:
        source = made[glm.indexer_source(layer)]
        assert given[layer] is source and used[layer] is source, layer


def test_routes_are_transformers_and_the_mixture_weights_agree(case: ParityCase) -> None:
    from megatron_xorl.layers.router import GlmRouter

    found: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, out, n=layer: found.update({n: out}))
        for layer, router in case.parts(GlmRouter)
    ]
    case.logits()
    for hook in hooks:
        hook.remove()
    assert found.keys() == case.hf_routes.keys() == {1, 2, 3}
    for layer, (indices, weights) in case.hf_routes.items():
        hf = torch.zeros(2 * LENGTH, 8).scatter(1, indices, weights.float())
        probs, routes = (
            t.view(LENGTH, 2, 8).transpose(0, 1).reshape(2 * LENGTH, 8) for t in found[layer]
        )
        assert torch.equal(routes, hf > 0), layer
        assert (probs - hf).abs().max() <= 1e-6, layer
