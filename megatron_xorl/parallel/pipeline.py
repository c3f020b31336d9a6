"""The pipeline cut in Megatron's own terms: what its config says, what is proposed, what is refused.

The one idea: ``config.stages`` knows which layers a stage may begin on; this file reads Megatron's fields and layouts, so that
both launch paths and the library judge a cut alike. Every rank judges the cuts of all stages: a rank that went on alone would
wait for those that refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.config.stages import check_stage_starts, megatron_layout, pipeline_stages
from megatron_xorl.errors import LayoutError

__all__ = ["check_pipeline_cut", "check_pipeline_layout", "proposed_layout"]

# Fields of Megatron's config that decide the cut; one of them given, nothing is proposed.
_CUT_FIELDS = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def proposed_layout(glm: GlmConfig, fields: Mapping[str, Any]) -> str | None:
    """Return the legal layout for config ``fields``, None with one stage or where the fields decide the cut themselves.

    Raises:
        LayoutError: there are more stages than layers that one can begin on.
    """
    pp = fields["pipeline_model_parallel_size"]
    if pp == 1 or any(fields.get(name) for name in _CUT_FIELDS):
        return None
    virtual = fields.get("virtual_pipeline_model_parallel_size") or 1
    return megatron_layout(pipeline_stages(glm, pp, virtual))


def check_pipeline_layout(glm: GlmConfig, layout: str | list[list[str]], pp: int) -> None:
    """Return if a layout in one of Megatron's two forms is one that ``glm`` can be cut by over ``pp`` ranks.

    Raises:
        LayoutError: Megatron cannot read it, it is another model's, or it parts a layer from the selection that it uses.
    """
    try:
        parsed = PipelineParallelLayerLayout(layout, pp)
        parsed.validate_layer_layout(num_layers=glm.num_hidden_layers, mtp_num_layers=None)
    except (AssertionError, NotImplementedError) as error:
        raise LayoutError(
            f"pipeline_model_parallel_layout {layout!r} cannot be used for {glm.num_hidden_layers} layers on pp {pp}: "
            f"{' '.join(str(error).split())}; leave it out to get {megatron_layout(pipeline_stages(glm, pp))}"
        ) from error
    _check(glm, _sizes(parsed))


def check_pipeline_cut(glm: GlmConfig, config: TransformerConfig) -> None:
    """Return if the cut that Megatron's ``config`` makes, wherever it comes from, is legal for ``glm``.

    Raises:
        LayoutError: a stage begins on a layer that uses the selection of the stage before.
    """
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if (layout := config.pipeline_model_parallel_layout) is not None:
        return _check(glm, _sizes(layout))
    virtual: list[int | None] = [None] if vpp is None else list(range(vpp))
    return _check(
        glm,
        [get_num_layers_to_build(config, stage, rank) for stage in virtual for rank in range(pp)],
    )


def _sizes(layout: PipelineParallelLayerLayout) -> list[int]:
    """Decoder layers of each stage (virtual stage) in model order."""
    return [
        layout.layout[rank][stage].count(LayerType.decoder)
        for stage in range(layout.virtual_pipeline_model_parallel_size)
        for rank in range(layout.pipeline_model_parallel_size)
    ]


def _check(glm: GlmConfig, sizes: Sequence[int]) -> None:
    ends = itertools.accumulate(sizes)
    starts = [end - size for end, size in zip(ends, sizes, strict=True) if size]
    check_stage_starts(glm, starts, len(sizes))
