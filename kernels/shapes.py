"""The one list of shapes that tests, the compiler and the benchmark go through.

Three scales: ``small`` for Triton's interpreter (a few programs each, everything ragged that may be ragged), ``medium`` for
comparing with the reference on a GPU, ``full`` for time there and for compiling ahead of time: GLM-5.2's own sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCALES", "Case", "cases"]

SCALES = ("small", "medium", "full")


@dataclass(frozen=True)
class Case:
    """A kernel and its sizes; ``dims`` as the subject of that name (:mod:`megatron_xorl.kernels.subjects`) reads them."""

    kernel: str
    label: str
    dims: dict[str, int]


# Columns: label, M, N, K, R (0: no adapter), separate (1: the base is rounded before the adapter is added).
_LINEAR = {
    "small": [
        ("aligned", 32, 256, 256, 16, 0),
        ("576 rows of weight", 70, 576, 256, 12, 0),
        ("one row, ragged K", 1, 200, 320, 0, 0),
        ("separate", 130, 128, 128, 32, 1),
    ],
    "medium": [
        ("o_proj / 8", 1000, 6144, 2048, 16, 0),
        ("kv_a_proj", 512, 576, 6144, 64, 0),
        ("separate", 512, 2048, 1024, 16, 1),
    ],
    "full": [
        ("o_proj", 8192, 6144, 16384, 0, 0),
        ("o_proj, rank 16", 8192, 6144, 16384, 16, 0),
        ("q_b_proj, rank 64", 8192, 16384, 2048, 64, 0),
        ("kv_a_proj, separate", 8192, 576, 6144, 16, 1),
    ],
}
# Columns: label, M, E, N, K, R, shared (1: one factor for all experts).
_GROUPED = {
    "small": [
        ("empty experts", 150, 4, 200, 256, 12, 0),
        ("shared factor", 60, 3, 128, 192, 16, 1),
        ("no adapter", 40, 2, 128, 128, 0, 0),
    ],
    "medium": [
        ("8 experts", 1000, 8, 1024, 2048, 16, 0),
        ("shared factor", 1000, 8, 2048, 1024, 16, 1),
    ],
    "full": [
        ("gate_up of 32 experts", 65536, 32, 4096, 6144, 0, 0),
        ("gate_up, rank 16", 65536, 32, 4096, 6144, 16, 0),
        ("down, shared rank 16", 65536, 32, 6144, 2048, 16, 1),
    ],
}
# Columns: label, T, H, R (rows of a head), first, P (rows that take part), K, rows (1: the sum is over them, 0: over K).
_HEADS = {
    "small": [
        ("K half, heads off the blocks", 20, 3, 448, 0, 192, 256, 1),
        ("V half, heads off the blocks", 20, 3, 448, 192, 256, 256, 0),
        ("ragged sum", 140, 2, 192, 64, 100, 200, 1),
        ("ragged columns", 5, 2, 192, 64, 100, 200, 0),
    ],
    "medium": [
        ("K half", 500, 8, 448, 0, 192, 512, 1),
        ("V half", 500, 8, 448, 192, 256, 512, 0),
    ],
    "full": [
        ("queries to latents", 8192, 64, 448, 0, 192, 512, 1),
        ("latents to values", 8192, 64, 448, 192, 256, 512, 0),
    ],
}
# Columns: label, S (queries), T (keys), H, D, DR, topk.
_ATTENTION = {
    "small": [
        ("unused places", 3, 48, 16, 64, 16, 24),
        ("8 heads, ragged selection", 2, 24, 8, 32, 16, 30),
        ("GLM-5.2's heads", 1, 80, 64, 512, 64, 70),
    ],
    "medium": [("a rank of TP 8", 64, 4096, 8, 512, 64, 512), ("GLM-5.2", 64, 4096, 64, 512, 64, 2048)],
    "full": [("GLM-5.2", 8192, 8192, 64, 512, 64, 2048)],
}  # fmt: skip
# Columns: label, S, T, H, D, topk.
_INDEXER = {
    "small": [
        ("GLM-5.2's heads", 4, 160, 32, 128, 40),
        ("fewer keys than topk", 4, 24, 16, 64, 40),
    ],
    "medium": [("GLM-5.2", 256, 4096, 32, 128, 2048)],
    "full": [("GLM-5.2", 8192, 8192, 32, 128, 2048)],
}
# Columns: label, rows, width.
_MATRIX = {
    "small": [("ragged", 70, 320)],
    "medium": [("ragged", 1000, 2000)],
    "full": [("hidden states", 8192, 6144)],
}

_COLUMNS = (
    (
        ("linear", "linear_dx", "linear_w8a16"),
        _LINEAR,
        ("M", "N", "K", "R", "separate"),
    ),
    (
        ("grouped_linear", "grouped_dx", "grouped_w8a16", "grouped_lora_gradient"),
        _GROUPED,
        ("M", "E", "N", "K", "R", "shared"),
    ),
    (("quantize_rows", "quantize_blocks"), _MATRIX, ("M", "K")),
    (("head_matmul",), _HEADS, ("T", "H", "R", "first", "P", "K", "rows")),
    (("lora_shrink", "lora_gradient"), _LINEAR, ("M", "N", "K", "R", "separate")),
    (("indexer_logits", "topk", "indexer_kl", "indexer_backward"), _INDEXER, ("S", "T", "H", "D", "topk")),
    (
        ("sparse_mla", "sparse_mla_backward", "sparse_mla_probs"),
        _ATTENTION,
        ("S", "T", "H", "D", "DR", "topk"),
    ),
)  # fmt: skip
_NEEDS_RANK = ("lora_shrink", "lora_gradient", "grouped_lora_gradient")


def cases(scale: str) -> list[Case]:
    """Every kernel at every shape of a scale.

    Raises:
        ValueError: an unknown scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; expected one of {', '.join(SCALES)}")
    found = []
    for kernels, table, columns in _COLUMNS:
        for kernel in kernels:
            for label, *sizes in table[scale]:
                dims = dict(zip(columns, sizes, strict=True))
                if kernel not in _NEEDS_RANK or dims["R"] > 0:
                    found.append(Case(kernel, label, dims))
    return found
