"""The contracts of the base model: names, limits, where each applies, and what it means in plain words.

The one idea: a contract is a row here and a function in ``tests/base/measures.py``; ``tests/base/matrix.py`` collects the
worst figure over all cases into one table. The oracle is transformers' ``GlmMoeDsaForCausalLM`` on the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.base import flips, measures
from tests.base.bench import Bench, Case
from tests.base.measures import Figure


@dataclass(frozen=True)
class Contract:
    """One line of the table."""

    name: str
    limit: str
    """As the table shows it."""
    measure: Callable[[Bench], Figure]
    meaning: str
    """One paragraph for a reader who has not seen the code."""
    where: Callable[[Case], bool] = lambda case: True
    pooled: bool = False
    """Judge the sum over all cases, for figures that a single rounding decides in a single case."""
    costly: bool = False
    """Needs a model of its own or a backward: in the default suite only on a few variants."""


# ---- where a contract applies ---------------------------------------------------------------------


def _conditioned(case: Case) -> bool:
    return case.conditioned


def _ill_conditioned(case: Case) -> bool:
    return not case.conditioned and case.batch == 3


def _once_a_model(case: Case) -> bool:
    return case.length == "above" and case.batch == 3


def _short(case: Case) -> bool:
    return case.length != "above" and case.conditioned


def _long(case: Case) -> bool:
    return case.length == "above" and case.conditioned


def _gradients(case: Case) -> bool:
    return _once_a_model(case) or (case.length == "above" and case.weights == "unit gain")


def _unit_gain(case: Case) -> bool:
    return _once_a_model(case) and case.weights == "unit gain"


def _default_init(case: Case) -> bool:
    return _once_a_model(case) and case.weights == "default init"


def _default_init_x4(case: Case) -> bool:
    return _once_a_model(case) and case.weights == "default init x4"


OWN = "or twice transformers' own error"
CONTRACTS: tuple[Contract, ...] = (
    Contract(
        "logits",
        f"1e-5, {OWN}",
        measures.logits,
        "Largest difference of any logit to transformers' fp32 eager model on the dequantised weights. Where it is more than "
        "that, our error against transformers' code in fp64 may be at most twice the error of transformers' own fp32.",
        _conditioned,
    ),
    Contract(
        "mean KL",
        "1e-7",
        measures.kl,
        "Mean over tokens of the KL divergence of the two next-token distributions, over the whole vocabulary in fp64.",
    ),
    Contract(
        "1 - cosine",
        "1e-6",
        measures.cosine,
        "One minus the cosine of the two models' logits, taken as one vector in fp64.",
    ),
    Contract(
        "error of a token against fp64",
        "twice transformers'",
        measures.typical_token,
        "With every projection four times a trained layer's size, rounding grows a hundredfold through the layers, "
        "in any implementation. So the error of the median token against transformers' code in fp64 is held against "
        "that of transformers' own fp32. (The single worst logit of 40,000 would be decided by luck.)",
        _ill_conditioned,
    ),
    Contract(
        "index sets",
        "0 queries",
        measures.index_sets,
        "Queries, over all layers that own an indexer, whose set of selected keys is not exactly transformers'.",
    ),
    Contract(
        "shared selection",
        "0 layers",
        measures.sources,
        "Layers that did not attend to the very tensor that the layer named by the schedule selected.",
    ),
    Contract(
        "route sets",
        "0 tokens",
        measures.route_sets,
        "Tokens, over all sparse layers, that go to other experts than in transformers: grouped choice, the bias in the "
        "choice, one expert a token.",
    ),
    Contract(
        "mixture weights",
        f"1e-6, {OWN}",
        measures.mixtures,
        "Largest difference of a weight that an expert's output is multiplied with; they are fp32, normalised or not as "
        "the config says, and without the bias. Where it is more than that, the root mean square over tokens of our error "
        "against fp64, summed over the layers, is held against transformers' own (the largest of some thousand errors of the "
        "last bits would be luck); with `unit gain x4` weights the median token's, as above.",
    ),
    Contract(
        "dense up to index_topk",
        f"1e-5, {OWN}",
        measures.dense,
        "Up to `index_topk` tokens the model must be plain causal latent attention: compared with transformers after "
        "every indexer's answer is replaced by all keys.",
        _short,
    ),
    Contract(
        "dense with index_topk raised",
        f"1e-5, {OWN}",
        measures.raised_topk,
        "The same for longer batches, from a config whose `index_topk` is larger than the batch.",
        _unit_gain,
        costly=True,
    ),
    Contract(
        "prefix",
        f"5e-6, {OWN}",
        measures.prefix,
        "The first half of a batch alone gives the logits it gives as part of the whole: no token sees a later one. Both runs "
        "round; where transformers' fp32 is itself further from its fp64, they may differ by twice that.",
        _long,
    ),
    Contract(
        "gradient at the embedding",
        "1e-5 relative, or twice transformers' error",
        measures.gradient,
        "Gradient of the loss at the embedding's output, through every frozen layer, against transformers' (L2, "
        "relative); with `unit gain x4` weights the median token's against fp64, as above.",
        _gradients,
        costly=True,
    ),
    Contract(
        "indexer gradients",
        "0 parameters",
        measures.indexer_gradients,
        "The language-model loss reaches no parameter of an indexer: none here requires or gets a gradient, and none "
        "gets one in transformers.",
        _gradients,
        costly=True,
    ),
    Contract(
        "weights",
        "0 tensors",
        measures.weights,
        "Tensors of the file that the built model does not hold to the bit, dequantised: every expert of a bank, both "
        "halves of a fused gate and up, ragged FP8 blocks, norms, router, embedding, head.",
        _once_a_model,
    ),
    Contract(
        "schedule",
        "0 layers",
        measures.schedule,
        "Layers that own an indexer, or experts, where transformers' reading of the same config says they do not, or the "
        "other way round.",
        _once_a_model,
    ),
    Contract(
        "norm epsilons",
        "1e-6",
        measures.epsilons,
        "Every norm of the model against transformers' on inputs of norm 2e-3, where 1e-5 and 1e-6 differ by a tenth and "
        "more; in whole logits the latent norms' epsilon hardly shows.",
        _once_a_model,
    ),
    Contract(
        "bf16: repeat and reload",
        "0 logits",
        measures.half_repeat,
        "Logits that change by a bit when the bf16 model runs again, or is loaded again.",
        _unit_gain,
        costly=True,
    ),
    Contract(
        "bf16: mean KL, default init",
        "5e-4",
        measures.half_kl(5e-4),
        "Our bf16 model against transformers in bf16, weights as transformers initialises them.",
        _default_init,
    ),
    Contract(
        "bf16: 1 - cosine, default init",
        "2e-3",
        measures.half_cosine(2e-3),
        "The same, as cosine of the logits.",
        _default_init,
    ),
    Contract(
        "bf16: mean KL, default init x4",
        "2.5e-2",
        measures.half_kl(2.5e-2),
        "The same with every projection four times as large.",
        _default_init_x4,
    ),
    Contract(
        "bf16: 1 - cosine, default init x4",
        "3e-2",
        measures.half_cosine(3e-2),
        "The same, as cosine of the logits.",
        _default_init_x4,
    ),
    Contract(
        "bf16: loss against fp32",
        "twice transformers'",
        measures.half_loss,
        "What bf16 costs us against what it costs transformers: the sums over all cases of the mean KL to transformers' "
        "fp32. Summed, because in one small model a single flipped expert decides the figure; for the same reason no "
        "fixed bound holds with `unit gain` weights, where transformers' own bf16 is at 4e-2.",
        _once_a_model,
        pooled=True,
        costly=True,
    ),
    Contract(
        "bf16: unexplained index flips",
        "0 queries",
        flips.half_index_flips,
        "In bf16 rounding decides between keys of nearly equal scores, in transformers as here, so sets differ. But where the "
        "two runs' scores of a query's keys differ by at most D, a key that only we selected may be at most 2 D below one that "
        "only transformers selected. Queries, over all layers that own an indexer, for which that does not hold. (In fp32 no "
        "set may differ at all.)",
        _once_a_model,
        costly=True,
    ),
    Contract(
        "bf16: unexplained route flips",
        "0 tokens",
        flips.half_route_flips,
        "The same for experts, in the scores that they are chosen by (the bias added); where a token may use some groups only, "
        "for the groups' scores too, and no expert outside them.",
        _once_a_model,
        costly=True,
    ),
    Contract(
        "bf16: index overlap missed",
        "not judged",
        measures.half_overlap,
        "Share of transformers' selected keys that we do not select in bf16. Evidence only: rounding flips near ties in "
        "both.",
        _once_a_model,
        costly=True,
    ),
    Contract(
        "bf16: routes missed",
        "not judged",
        measures.half_routes,
        "Share of transformers' routes that we do not take in bf16. Evidence only.",
        _once_a_model,
        costly=True,
    ),
)
