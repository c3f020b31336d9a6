"""What each known server will and will not apply of an adapter file: one table, with the public source of every row.

The one idea: a server that loads a file without a word may still leave factors out or scale them wrongly. Each row says for which
adapters it holds (a condition on what the file contains), what the server does, and where that can be read; an export prints the
rows that concern it. Rows describe the versions their sources describe: look there before relying on one.

CPU command: ``megatron-xorl adapter inspect DIR``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_xorl.adapters.inventory import Factor

__all__ = ["NOTES", "Note", "server_notes"]

SHARED, EXPERTS, FUSED = "sglang_shared_outer", "hf_peft", "hf_peft_fused"


@dataclass(frozen=True, slots=True)
class Holding:
    """What decides whether a row concerns a file."""

    format: str
    regions: frozenset[str]
    leaves: frozenset[str]
    ranks: frozenset[int]
    rslora: bool

    @property
    def banks(self) -> bool:
        """Whether the file holds factors of routed experts."""
        return "routed_experts" in self.regions


@dataclass(frozen=True, slots=True)
class Note:
    """A row: ``effect`` is ``applies``, ``needs`` (works with the flag named), ``ignores`` or ``refuses``.

    ``{rank}`` in the text is the largest rank of the file.
    """

    server: str
    effect: str
    concerns: Callable[[Holding], bool]
    text: str
    source: str


def _several_ranks(held: Holding) -> bool:
    return len(held.ranks) > 1


NOTES: tuple[Note, ...] = (
    Note(
        "vLLM", "needs", lambda held: max(held.ranks) > 16,
        "--max-lora-rank {rank}: the default is 16, and a larger adapter is refused",
        "https://github.com/vllm-project/vllm/issues/2847",
    ),
    Note(
        "vLLM", "needs", lambda held: held.banks and held.format == SHARED,
        "--enable-moe-shared-loras for experts.w1, w2 and w3: sharing is not detected from shapes",
        "https://github.com/vllm-project/vllm/issues/48884",
    ),
    Note(
        "vLLM", "ignores", lambda held: "kv_b_proj" in held.leaves,
        "kv_b_proj: absorbed latent attention reads the base weight, so these factors change nothing",
        "https://github.com/vllm-project/vllm/issues/48974",
    ),
    Note(
        "vLLM", "ignores", _several_ranks,
        "rank_pattern: one scale, alpha / r of the configuration, multiplies every target, wrongly where the rank differs",
        "https://github.com/vllm-project/vllm/blob/main/vllm/lora/peft_helper.py",
    ),
    Note(
        "vLLM", "refuses", lambda held: held.banks and held.format == FUSED,
        "experts.base_layer: the fused storage of transformers is read for models that declare it only; use hf_peft",
        "https://github.com/vllm-project/vllm/issues/52198",
    ),
    Note(
        "vLLM", "ignores", lambda held: held.banks,
        "block scales of FP8 experts, in versions before the fix: adapters on an FP8 base gave wrong text",
        "https://github.com/vllm-project/vllm/issues/42007",
    ),
    Note(
        "SGLang", "applies", lambda held: held.banks and held.format == SHARED,
        "experts.w1, w2 and w3 with the shared side told from shapes; some runners need --experts-shared-outer-loras",
        "https://github.com/sgl-project/sglang/pull/21466",
    ),
    Note(
        "SGLang", "needs", lambda held: True,
        "--max-lora-rank of at least {rank} and --lora-target-modules with every leaf of target_modules, unless the first "
        "adapter loaded has them all",
        "https://docs.sglang.ai/advanced_features/lora.html",
    ),
    Note(
        "SGLang", "ignores", lambda held: bool({"shared_experts", "dense_mlp"} & held.regions) and not held.banks,
        "the path of a target: leaf names are matched as substrings, so gate_proj, up_proj and down_proj allocate buffers for "
        "routed experts as well",
        "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/lora/utils.py",
    ),
    Note(
        "SGLang", "ignores", lambda held: True,
        "tensors it does not know, with a log line alone; strict loading (lora_strict_loading) makes it an error",
        "https://github.com/sgl-project/sglang/pull/27381",
    ),
    Note(
        "SGLang", "ignores", lambda held: held.rslora,
        "use_rslora: factors are scaled by alpha / r, sqrt(r) times too weakly",
        "https://github.com/sgl-project/sglang/issues/40835",
    ),
    Note(
        "SGLang", "ignores", _several_ranks,
        "rank_pattern: one scale, alpha / r of the configuration, multiplies every target",
        "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/lora/lora.py",
    ),
    Note(
        "SGLang", "ignores", lambda held: "kv_b_proj" in held.leaves,
        "kv_b_proj, in versions before support for absorbed latent attention",
        "https://github.com/sgl-project/sglang/pull/25001",
    ),
    Note(
        "transformers + PEFT", "applies", lambda held: held.format == EXPERTS,
        "everything: the configuration names shared experts and dense layers as parameters, which PEFT does not move",
        "https://github.com/huggingface/peft/issues/3711",
    ),
    Note(
        "transformers + PEFT", "needs", lambda held: held.format == FUSED,
        "peft 0.19.1 or later: before, A and B of a bank are stored in each other's place",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3626",
    ),
    Note(
        "transformers + PEFT", "ignores", lambda held: held.banks and held.format == SHARED,
        "experts.w1, w2 and w3: loading warns of missing keys and leaves the routed experts as they are; export hf_peft",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6076",
    ),
    Note(
        "transformers + PEFT", "ignores",
        lambda held: held.format == SHARED and bool({"shared_experts", "dense_mlp"} & held.regions),
        "shared experts and dense layers named by leaf in target_modules: PEFT moves those targets to the routed experts "
        "without a word; export hf_peft",
        "https://github.com/huggingface/peft/issues/3711",
    ),
    Note(
        "XoRL", "applies", lambda held: held.format == SHARED,
        "every factor under these keys, the head too: lm_head.lora_A.weight is read as its own lm_head.lora_embedding_A is",
        "https://github.com/togethercomputer/xorl/blob/main/src/xorl/lora/utils.py",
    ),
    Note(
        "XoRL", "refuses", lambda held: held.rslora or _several_ranks(held),
        "rsLoRA and ranks that differ: one rank, one alpha, scale alpha / r",
        "https://github.com/togethercomputer/xorl/blob/main/src/xorl/lora/utils.py",
    ),
)  # fmt: skip


def server_notes(
    factors: Sequence[Factor], format: str, *, rslora: bool = False
) -> list[dict[str, str]]:
    """Return the rows that concern a file.

    Args:
        factors: what the file holds.
        format: of the file.
        rslora: whether its scale is alpha / sqrt(rank).

    Returns:
        ``[{"server", "effect", "text", "source"}]`` in the order of the table.
    """
    held = Holding(
        format,
        frozenset(factor.region for factor in factors),
        frozenset(factor.target.rpartition(".")[2] for factor in factors),
        frozenset(factor.rank for factor in factors),
        rslora,
    )
    return [
        {
            "server": note.server,
            "effect": note.effect,
            "text": note.text.format(rank=max(held.ranks)),
            "source": note.source,
        }
        for note in NOTES
        if note.concerns(held)
    ]
