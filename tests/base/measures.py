"""What is measured on one checkpoint and one batch, and the limit that the figure must not exceed.

The one idea: a limit is a number where any correct fp32 implementation meets it, and twice what transformers' own fp32
is off from its fp64 where it does not: with large weights every fp32 implementation is off by more than a fixed number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.base.bench import Bench
from tests.base.subject import Subject, embedding_gradient_theirs, run_dense
from tests.base.variants import TOPK
from tests.oracle import hf_tensors_fp32
from tests.training.comparison import relative

Figure = tuple[float, float]
"""What was measured, and its limit."""


# ---- metrics --------------------------------------------------------------------------------------


def mean_kl(found: Tensor, expected: Tensor) -> float:
    """Mean over tokens of KL(expected || found), in fp64 over the whole vocabulary."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def one_minus_cosine(found: Tensor, expected: Tensor) -> float:
    """Of the whole logits, in fp64."""
    a, b = found.double().flatten(), expected.double().flatten()
    return 1 - (a @ b / (a.norm() * b.norm())).item()


def largest(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference."""
    return (found.double() - expected.double()).abs().max().item()


def _judged(found: Tensor, theirs: Tensor, exact: Callable[[], Tensor], fixed: float) -> Figure:
    """The difference to transformers where that is within ``fixed``; else our error against transformers' own."""
    difference = largest(found, theirs)
    if difference <= fixed:
        return difference, fixed
    return largest(found, exact()), max(fixed, 2 * largest(theirs, exact()))


def _median_token(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected.double()).norm(dim=-1).median().item()


def _root_mean_square(found: Tensor, expected: Tensor) -> float:
    """Of the tokens' errors: unlike their largest no matter of luck, and one gross error still shows."""
    return (found.double() - expected.double()).norm(dim=-1).square().mean().sqrt().item()


def _differing(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> float:
    """Rows that differ, over all layers; other layers altogether count as infinitely many."""
    if ours.keys() != theirs.keys():
        return float("inf")
    return float(sum(int((ours[n] != theirs[n]).any(-1).sum()) for n in ours))


def _overlap(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> float:
    """Share of their choices that are ours too; 1 where nothing is chosen."""
    both = sum(int((ours[n] & theirs[n]).sum()) for n in theirs)
    return both / max(1, sum(int(theirs[n].sum()) for n in theirs)) if theirs else 1.0


# ---- measures -------------------------------------------------------------------------------------


def logits(bench: Bench) -> Figure:
    return _judged(bench.ours.logits, bench.theirs.logits, lambda: bench.exact.logits, 1e-5)


def kl(bench: Bench) -> Figure:
    return mean_kl(bench.ours.logits, bench.theirs.logits), 1e-7


def cosine(bench: Bench) -> Figure:
    return one_minus_cosine(bench.ours.logits, bench.theirs.logits), 1e-6


def typical_token(bench: Bench) -> Figure:
    exact = bench.exact.logits
    return _median_token(bench.ours.logits, exact), 2 * _median_token(bench.theirs.logits, exact)


def index_sets(bench: Bench) -> Figure:
    return _differing(bench.ours.selected, bench.theirs.selected), 0


def sources(bench: Bench) -> Figure:
    return float(bench.ours.strangers), 0


def route_sets(bench: Bench) -> Figure:
    return _differing(bench.ours.routes, bench.theirs.routes), 0


def mixtures(bench: Bench) -> Figure:
    ours, theirs = bench.ours.mixtures, bench.theirs.mixtures
    if bench.case.conditioned:
        difference = max((largest(ours[n], theirs[n]) for n in theirs), default=0.0)
        if difference <= 1e-6:
            return difference, 1e-6
    exact = bench.exact.mixtures
    size = _root_mean_square if bench.case.conditioned else _median_token
    ours_off, theirs_off = (sum(size(x[n], exact[n]) for n in exact) for x in (ours, theirs))
    return ours_off, 2 * theirs_off if bench.case.conditioned else max(1e-6, 2 * theirs_off)


def dense(bench: Bench) -> Figure:
    return _against_dense(bench, bench.ours.logits)


def raised_topk(bench: Bench) -> Figure:
    raised = bench.subject.with_topk(10 * TOPK, bench.folder / "raised")
    return _against_dense(bench, bench.run(raised.model, bench.ids).logits)


def _against_dense(bench: Bench, found: Tensor) -> Figure:
    theirs = run_dense(bench.subject.oracle, bench.ids)
    return _judged(found, theirs, lambda: run_dense(bench.subject.exact, bench.ids), 1e-5)


def prefix(bench: Bench) -> Figure:
    part = slice(0, bench.ids.shape[1] // 2)
    found = bench.run(bench.subject.model, bench.ids[:, part]).logits
    difference = largest(found, bench.ours.logits[:, part])
    if difference <= 5e-6:
        return difference, 5e-6
    return difference, max(5e-6, 2 * largest(bench.theirs.logits, bench.exact.logits))


def gradient(bench: Bench) -> Figure:
    found, expected = bench.embedding_gradients
    if bench.case.conditioned:
        return relative(found, expected), 1e-5
    exact = embedding_gradient_theirs(bench.subject.exact, bench.ids, bench.labels)
    return _median_token(found, exact), 2 * _median_token(expected, exact)


def indexer_gradients(bench: Bench) -> Figure:
    """Indexer parameters that require or have a gradient here, and that have one in transformers."""
    from megatron_xorl.layers.indexer import Indexer

    assert all(float(gradient.norm()) > 0 for gradient in bench.embedding_gradients)
    ours = [p for _, part in bench.subject.parts(Indexer) for p in part.parameters()]
    oracle = bench.subject.oracle
    hf = [p for name, p in oracle.named_parameters() if ".indexer." in name]
    assert ours and hf and oracle.model.norm.weight.grad is not None
    wrong = [p for p in ours if p.requires_grad or p.grad is not None]
    return float(len(wrong) + sum(p.grad is not None for p in hf)), 0


def weights(bench: Bench) -> Figure:
    """Tensors of the file that the model does not hold to the bit, each expert and each half of a fused pair by itself."""
    from megatron_xorl.fp8.weight import FrozenWeight
    from megatron_xorl.weights.names import hf_tensors

    model, expected = bench.subject.model, hf_tensors_fp32(bench.subject.directory)
    wrong = 0
    for row in hf_tensors(bench.subject.glm):
        if row.megatron is None:
            continue
        owner = model.get_submodule(row.megatron.rpartition(".")[0])
        base = getattr(owner, "base", None)
        if isinstance(base, FrozenWeight):
            rows = row.shape[0]
            part = slice((row.part or 0) * rows, (row.part or 0) * rows + rows)
            columns = slice(0, row.shape[1])
            value = base.tile(torch.float32, rows=part, cols=columns, expert=row.expert)
        else:
            value = getattr(owner, row.megatron.rpartition(".")[2]).float()
        wrong += not torch.equal(value, expected[row.hf])
    return float(wrong), 0


def schedule(bench: Bench) -> Figure:
    """Layers whose indexer or MLP is not of the kind that transformers derives from the same ``config.json``."""
    from megatron_xorl.layers.indexer import Indexer
    from megatron_xorl.layers.router import GlmRouter

    config, layers = bench.subject.oracle.config, range(bench.subject.glm.num_hidden_layers)
    indexers = {layer for layer, _ in bench.subject.parts(Indexer)}
    routers = {layer for layer, _ in bench.subject.parts(GlmRouter)}
    wrong = sum((config.indexer_types[n] == "full") != (n in indexers) for n in layers)
    wrong += sum((config.mlp_layer_types[n] == "sparse") != (n in routers) for n in layers)
    return float(wrong), 0


def epsilons(bench: Bench) -> Figure:
    """Every norm on inputs so small that its epsilon decides the result."""
    worst = 0.0
    for ours, theirs in norm_pairs(bench.subject):
        draw = torch.Generator().manual_seed(1)
        x = 2e-3 * torch.randn(4, theirs.weight.shape[0], generator=draw)
        with torch.no_grad():
            worst = max(worst, largest(ours(x), theirs(x)))
    return worst, 1e-6


def norm_pairs(subject: Subject) -> list[tuple[Any, Any]]:
    """Our norms with transformers' of the same place."""
    pairs = [(subject.model.decoder.final_layernorm, subject.oracle.model.norm)]
    for ours, theirs in zip(subject.model.decoder.layers, subject.oracle.model.layers, strict=True):
        attention, other = ours.self_attention, theirs.self_attn
        pairs += [
            (ours.input_layernorm, theirs.input_layernorm),
            (ours.pre_mlp_layernorm, theirs.post_attention_layernorm),
            (attention.q_layernorm, other.q_a_layernorm),
            (attention.kv_layernorm, other.kv_a_layernorm),
        ]
        if other.indexer is not None:
            pairs.append((attention.core_attention.indexer.k_norm, other.indexer.k_norm))
    return pairs


def half_repeat(bench: Bench) -> Figure:
    again = bench.run(bench.subject.half, bench.ids).logits
    reloaded = bench.run(bench.subject.loaded(torch.bfloat16), bench.ids).logits
    same = bench.half.logits
    return float(int((again != same).sum()) + int((reloaded != same).sum())), 0


def half_kl(limit: float) -> Callable[[Bench], Figure]:
    return lambda bench: (mean_kl(bench.half.logits, bench.their_half.logits), limit)


def half_cosine(limit: float) -> Callable[[Bench], Figure]:
    return lambda bench: (one_minus_cosine(bench.half.logits, bench.their_half.logits), limit)


def half_loss(bench: Bench) -> Figure:
    fp32 = bench.theirs.logits
    return mean_kl(bench.half.logits, fp32), 2 * mean_kl(bench.their_half.logits, fp32)


def half_overlap(bench: Bench) -> Figure:
    return 1 - _overlap(bench.half.selected, bench.their_half.selected), float("inf")


def half_routes(bench: Bench) -> Figure:
    return 1 - _overlap(bench.half.routes, bench.their_half.routes), float("inf")
