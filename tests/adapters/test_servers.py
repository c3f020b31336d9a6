"""Notes about servers: those that concern an adapter, and no others."""

from __future__ import annotations

import pytest

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.servers import NOTES, server_notes
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config


def told(format: str = "sglang_shared_outer", **adapter: object) -> str:
    config = AdapterConfig(**({"rank": 4, "alpha": 8} | adapter))
    factors = build_inventory(load_glm_config("tiny"), config).trainable
    notes = server_notes(factors, format, rslora=config.rslora)
    return "\n".join(f"{note['server']} {note['effect']} {note['text']}" for note in notes)


@pytest.mark.parametrize(
    ("there", "absent", "line"),
    [
        ({}, {"targets": ["q_a_proj"]}, "vLLM ignores kv_b_proj"),
        ({}, {"targets": ["q_a_proj"]}, "vLLM needs --enable-moe-shared-loras"),
        ({}, {"format": "hf_peft"}, "transformers + PEFT ignores experts.w1"),
        ({}, {"targets": ["q_a_proj"]}, "transformers + PEFT ignores shared experts and dense"),
        ({"rank": 64}, {"rank": 16}, "vLLM needs --max-lora-rank 64"),
        ({"rslora": True}, {}, "SGLang ignores use_rslora"),
        ({"rank": {"lm_head": 2, "default": 4}}, {}, "vLLM ignores rank_pattern"),
        ({}, {"format": "hf_peft"}, "XoRL applies every factor under these keys, the head too"),
        ({"format": "hf_peft_fused"}, {"format": "hf_peft"}, "needs peft 0.19.1"),
    ],
)
def test_a_note_is_told_where_it_concerns_the_file_and_nowhere_else(
    there: dict[str, object], absent: dict[str, object], line: str
) -> None:
    assert line in told(**there)
    assert line not in told(**absent)


def test_every_note_has_a_public_source_and_one_of_four_effects() -> None:
    for note in NOTES:
        assert note.source.startswith("https://")
        assert note.effect in {"applies", "needs", "ignores", "refuses"}
