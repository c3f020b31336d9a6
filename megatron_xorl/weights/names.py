"""The one table: every tensor of a GLM-5 family checkpoint, and the Megatron parameter it becomes.

One row a tensor, written once, read in both directions. ``{layer}`` and ``{expert}`` are filled in
by :func:`hf_tensors`, which returns exactly the tensors a checkpoint of that config holds, in model
order. BF16 GLM-5.2: 59,585 tensors, of which 791 are the MTP layer 78.

Facts the table encodes:

* Megatron fuses gate and up into ``linear_fc1`` (``part`` 0 is gate, the upper half; 1 is up) and
  banks the experts (``expert`` is the index on the leading axis of the bank).
* A layer whose ``indexer_types`` entry is ``shared`` owns no indexer tensors.
* MTP layers (``model.layers.{num_hidden_layers}`` and on) are carried through conversion and never
  built: ``megatron`` is None.
* ``quantization_config.modules_to_not_convert`` leaves modules of an FP8 checkpoint as they were; an unquantised checkpoint has
  the dtype that its config names.
* ``fp8`` rows have a companion ``<name>_scale_inv`` in an FP8 checkpoint. Norms, the router, the
  indexer's ``weights_proj`` and ``k_norm``, ``eh_proj``, the embedding and the head stay bf16;
  ``e_score_correction_bias`` is fp32 from file to file.

Imports no torch: listing what a checkpoint must hold takes a config and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig

__all__ = [
    "SCALE_SUFFIX",
    "SHIPPED_MISSPELLING",
    "TensorRow",
    "hf_tensors",
    "mtp_prefixes",
    "row_for",
    "rows_by_layer",
    "rows_by_name",
    "unmatched_entries",
]

SCALE_SUFFIX = "_scale_inv"
"""``<weight>_scale_inv`` holds the block scales of an FP8 weight; despite the name they multiply."""

SHIPPED_MISSPELLING = ".self_attn.indexers_proj"
"""How 21 entries of ``modules_to_not_convert`` in GLM-5.2's own config.json end; no module of the model has this name."""


class TensorRow(NamedTuple):
    """One tensor of the checkpoint.

    ``shape`` is the full tensor's; ``tp_axis`` the axis that tensor parallelism cuts (for routed experts: expert tensor
    parallelism), None when replicated. ``region`` is one of the five adapter regions, or embedding, norm, indexer, router, mtp.
    """

    hf: str
    megatron: str | None
    part: int | None
    expert: int | None
    shape: tuple[int, ...]
    dtype: str
    """``fp8``, ``bf16`` or ``fp32``."""
    region: str
    tp_axis: int | None
    layer: int | None
    scale_shape: tuple[int, ...] | None

    @property
    def quantized(self) -> bool:
        """Whether the file holds e4m3 codes with a scale companion."""
        return self.scale_shape is not None

    @property
    def scale_name(self) -> str | None:
        """Name of the scale companion, None for tensors that are not quantised."""
        return self.hf + SCALE_SUFFIX if self.scale_shape is not None else None


class _Row(NamedTuple):
    hf: str
    megatron: str | None
    part: int | None
    shape: str
    kind: str
    region: str
    tp_axis: int | None


# Sizes, by config key: H hidden_size, V vocab_size, F intermediate_size, M moe_intermediate_size, S M * n_shared_experts,
# E n_routed_experts, Q q_lora_rank, C kv_lora_rank, CR kv_lora_rank + qk_rope_head_dim, HQ heads * (nope + rope),
# HKV heads * (nope + v), HV heads * v, IH index_n_heads, ID index_head_dim, IQ index_n_heads * index_head_dim, 2H twice H.
# kind: fp8 = e4m3 with scales when the checkpoint is quantised, bf16 otherwise.
# fmt: off
_TOP = (
    #    Hugging Face                    Megatron                             part  shape    kind    region       tp
    _Row("model.embed_tokens.weight",    "embedding.word_embeddings.weight",  None, "V H",   "bf16", "embedding", 0),
)
_END = (
    _Row("model.norm.weight",            "decoder.final_layernorm.weight",    None, "H",     "bf16", "norm",      None),
    _Row("lm_head.weight",               "output_layer.weight",               None, "V H",   "bf16", "lm_head",   0),
)
# Every row below is preceded by model.layers.{layer}. and decoder.layers.{layer}.
_ATTENTION = (
    _Row("input_layernorm.weight",             "input_layernorm.weight",                   None, "H",     "bf16", "norm",      None),
    _Row("self_attn.q_a_proj.weight",          "self_attention.linear_q_down_proj.weight", None, "Q H",   "fp8",  "attention", None),
    _Row("self_attn.q_a_layernorm.weight",     "self_attention.q_layernorm.weight",        None, "Q",     "bf16", "norm",      None),
    _Row("self_attn.q_b_proj.weight",          "self_attention.linear_q_up_proj.weight",   None, "HQ Q",  "fp8",  "attention", 0),
    _Row("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", None, "CR H", "fp8", "attention", None),
    _Row("self_attn.kv_a_layernorm.weight",    "self_attention.kv_layernorm.weight",       None, "C",     "bf16", "norm",      None),
    _Row("self_attn.kv_b_proj.weight",         "self_attention.linear_kv_up_proj.weight",  None, "HKV C", "fp8",  "attention", 0),
    _Row("self_attn.o_proj.weight",            "self_attention.linear_proj.weight",        None, "H HV",  "fp8",  "attention", 1),
)
_INDEXER = (
    _Row("self_attn.indexer.wq_b.weight",         "self_attention.core_attention.indexer.linear_wq_b.weight",         None, "IQ Q", "fp8",  "indexer", None),
    _Row("self_attn.indexer.wk.weight",           "self_attention.core_attention.indexer.linear_wk.weight",           None, "ID H", "fp8",  "indexer", None),
    _Row("self_attn.indexer.k_norm.weight",       "self_attention.core_attention.indexer.k_norm.weight",              None, "ID",   "bf16", "indexer", None),
    _Row("self_attn.indexer.k_norm.bias",         "self_attention.core_attention.indexer.k_norm.bias",                None, "ID",   "bf16", "indexer", None),
    _Row("self_attn.indexer.weights_proj.weight", "self_attention.core_attention.indexer.linear_weights_proj.weight", None, "IH H", "bf16", "indexer", None),
)
_MLP_NORM = (
    _Row("post_attention_layernorm.weight",    "pre_mlp_layernorm.weight",     None, "H",   "bf16", "norm",      None),
)
_DENSE = (
    _Row("mlp.gate_proj.weight",               "mlp.linear_fc1.weight",        0,    "F H", "fp8",  "dense_mlp", 0),
    _Row("mlp.up_proj.weight",                 "mlp.linear_fc1.weight",        1,    "F H", "fp8",  "dense_mlp", 0),
    _Row("mlp.down_proj.weight",               "mlp.linear_fc2.weight",        None, "H F", "fp8",  "dense_mlp", 1),
)
_ROUTER = (
    _Row("mlp.gate.weight",                    "mlp.router.weight",            None, "E H", "bf16", "router",    None),
    _Row("mlp.gate.e_score_correction_bias",   "mlp.router.expert_bias",       None, "E",   "fp32", "router",    None),
)
_EXPERT = (
    _Row("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.linear_fc1.weight", 0,    "M H", "fp8", "routed_experts", 0),
    _Row("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.linear_fc1.weight", 1,    "M H", "fp8", "routed_experts", 0),
    _Row("mlp.experts.{expert}.down_proj.weight", "mlp.experts.linear_fc2.weight", None, "H M", "fp8", "routed_experts", 1),
)
_SHARED = (
    _Row("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.linear_fc1.weight", 0,    "S H", "fp8", "shared_experts", 0),
    _Row("mlp.shared_experts.up_proj.weight",   "mlp.shared_experts.linear_fc1.weight", 1,    "S H", "fp8", "shared_experts", 0),
    _Row("mlp.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", None, "H S", "fp8", "shared_experts", 1),
)
# The MTP layer: these four, then a whole MoE layer with an indexer of its own.
_MTP = (
    _Row("enorm.weight",            None, None, "H",    "bf16", "mtp", None),
    _Row("hnorm.weight",            None, None, "H",    "bf16", "mtp", None),
    _Row("eh_proj.weight",          None, None, "H 2H", "bf16", "mtp", None),
    _Row("shared_head.norm.weight", None, None, "H",    "bf16", "mtp", None),
)
# fmt: on


def hf_tensors(config: GlmConfig) -> tuple[TensorRow, ...]:
    """Return every tensor a checkpoint of ``config`` holds, in model order, MTP layers last. Scales are not rows of their own."""
    return _hf_tensors(config)


def rows_by_name(config: GlmConfig) -> dict[str, TensorRow]:
    """Return the rows keyed by Hugging Face name."""
    return {row.hf: row for row in hf_tensors(config)}


def rows_by_layer(config: GlmConfig) -> dict[int | None, tuple[TensorRow, ...]]:
    """Return the rows of each layer, MTP layers included, and under None those of no layer: embedding, final norm, head."""
    return _by_layer(config)


def row_for(
    config: GlmConfig, megatron: str, part: int | None = None, expert: int | None = None
) -> TensorRow:
    """Return the row of a Megatron parameter: its full name, the half of a fused gate/up, the expert of a bank.

    Raises:
        KeyError: no tensor of the checkpoint becomes that parameter.
    """
    return _by_megatron(config)[(megatron, part, expert)]


def mtp_prefixes(config: GlmConfig) -> tuple[str, ...]:
    """Return ``model.layers.N.`` of each multi-token-prediction layer."""
    first = config.num_hidden_layers
    return tuple(
        f"model.layers.{layer}." for layer in range(first, first + config.num_nextn_predict_layers)
    )


def unmatched_entries(config: GlmConfig) -> tuple[str, ...]:
    """Return the entries of ``modules_to_not_convert`` that name no module with a tensor of its own, but for the shipped misspelling.

    They leave nothing out: ``mlp`` alone is no start and no end of such a module's name.
    """
    modules = {_module(row.hf) for row in hf_tensors(config)}
    candidates = [
        entry
        for entry in config.modules_to_not_convert
        if entry not in modules and not entry.endswith(SHIPPED_MISSPELLING)
    ]
    return tuple(entry for entry in candidates if not any(map(_left_out((entry,)), modules)))


def _module(hf: str) -> str:
    """The module that transformers converts or not for a tensor: its owner, for a routed expert the bank as a whole."""
    bank, experts, _ = hf.partition(".mlp.experts.")
    return bank + experts.removesuffix(".") if experts else hf.rpartition(".")[0]


def _left_out(entries: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether a module is left unconverted by one of ``entries``.

    The rule of transformers 5.23: an entry is a regular expression for the beginning of the name up to the end of a component,
    or it is literally the end of the name.
    """
    plain = [entry for entry in entries if re.fullmatch(r"[\w.-]+", entry)]
    beginnings = (["|".join(plain)] if plain else []) + [e for e in entries if e not in {*plain}]
    patterns = [re.compile(rf"(?:{beginning})(?:(?<=\.)|(?=\.|$))") for beginning in beginnings]

    @cache
    def left_out(module: str) -> bool:
        return module.endswith(entries) or any(pattern.match(module) for pattern in patterns)

    return left_out


@lru_cache(maxsize=8)
def _hf_tensors(config: GlmConfig) -> tuple[TensorRow, ...]:
    return tuple(_walk(config))


@lru_cache(maxsize=8)
def _by_layer(config: GlmConfig) -> dict[int | None, tuple[TensorRow, ...]]:
    grouped: dict[int | None, list[TensorRow]] = {}
    for row in hf_tensors(config):
        grouped.setdefault(row.layer, []).append(row)
    return {layer: tuple(rows) for layer, rows in grouped.items()}


@lru_cache(maxsize=8)
def _by_megatron(config: GlmConfig) -> dict[tuple[str, int | None, int | None], TensorRow]:
    return {(r.megatron, r.part, r.expert): r for r in hf_tensors(config) if r.megatron is not None}


def _walk(config: GlmConfig) -> Iterator[TensorRow]:
    expand = _Expander(config)
    yield from expand(_TOP)
    for layer in range(config.num_hidden_layers):
        full = config.indexer_types[layer] == "full"
        yield from expand(_ATTENTION + (_INDEXER if full else ()) + _MLP_NORM, layer)
        yield from _mlp(expand, config, layer, dense=config.is_dense(layer))
    yield from expand(_END)
    for offset in range(config.num_nextn_predict_layers):
        layer = config.num_hidden_layers + offset
        for row in (
            *expand(_MTP + _ATTENTION + _INDEXER + _MLP_NORM, layer),
            *_mlp(expand, config, layer, dense=False),
        ):
            yield row._replace(megatron=None, part=None, expert=None, region="mtp", tp_axis=None)


def _mlp(expand: _Expander, config: GlmConfig, layer: int, *, dense: bool) -> Iterator[TensorRow]:
    if dense:
        yield from expand(_DENSE, layer)
        return
    yield from expand(_ROUTER, layer)
    yield from expand(_EXPERT, layer, range(config.n_routed_experts))
    yield from expand(_SHARED, layer)


class _Expander:
    """Fills layer, expert and sizes into table rows."""

    def __init__(self, config: GlmConfig) -> None:
        self._block = config.weight_block_size
        self._sizes = _sizes(config)
        self._left_out = _left_out(config.modules_to_not_convert)
        # A checkpoint that is not quantised has one dtype; in a quantised one that key says nothing of the file.
        self._plain = "fp32" if self._block is None and config.dtype == "float32" else "bf16"

    def __call__(
        self, rows: tuple[_Row, ...], layer: int | None = None, experts: range | None = None
    ) -> Iterator[TensorRow]:
        """Rows of a layer, or of no layer; with ``experts``, all rows of the first expert, then of the next."""
        filled = [self._fill(row, layer) for row in rows]
        if experts is None:
            yield from filled
            return
        # 58,000 rows come from here: the name is cut once a layer, the rest of a row is the same for all experts.
        templates = [(*row.hf.split("{expert}"), row[1:3], row[4:]) for row in filled]
        for expert in experts:
            for before, after, target, rest in templates:
                yield TensorRow(f"{before}{expert}{after}", *target, expert, *rest)

    def _fill(self, row: _Row, layer: int | None) -> TensorRow:
        hf = _full_name("model", row.hf, layer)
        shape = tuple(self._sizes[size] for size in row.shape.split())
        scales, dtype = None, "fp32" if row.kind == "fp32" else self._plain
        if row.kind == "fp8" and self._block is not None and not self._left_out(_module(hf)):
            scales, dtype = _grid(shape, self._block), "fp8"
        return TensorRow(
            hf=hf,
            megatron=None if row.megatron is None else _full_name("decoder", row.megatron, layer),
            part=row.part,
            expert=None,
            shape=shape,
            dtype=dtype,
            region=row.region,
            tp_axis=row.tp_axis,
            layer=layer,
            scale_shape=scales,
        )


def _full_name(stem: str, name: str, layer: int | None) -> str:
    return name if layer is None else f"{stem}.layers.{layer}.{name}"


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Ceil-divide; the torch side of the package has the same rule in ``fp8.format.block_grid``, a test holds them together."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _sizes(config: GlmConfig) -> dict[str, int]:
    heads, nope, v = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    return {
        "H": config.hidden_size,
        "2H": 2 * config.hidden_size,
        "V": config.vocab_size,
        "F": config.intermediate_size,
        "M": config.moe_intermediate_size,
        "S": config.moe_intermediate_size * config.n_shared_experts,
        "E": config.n_routed_experts,
        "Q": config.q_lora_rank,
        "C": config.kv_lora_rank,
        "CR": config.kv_lora_rank + config.qk_rope_head_dim,
        "HQ": heads * (nope + config.qk_rope_head_dim),
        "HKV": heads * (nope + v),
        "HV": heads * v,
        "IH": config.index_n_heads,
        "ID": config.index_head_dim,
        "IQ": config.index_n_heads * config.index_head_dim,
    }
