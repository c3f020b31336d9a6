"""What a file holds is told from its keys and shapes; what fits no factor is refused by name."""

from __future__ import annotations

import pytest

from megatron_xorl.adapters.formats import FORMATS, file_entries
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.recovery import Shapes, recover
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError

DOCUMENT = {"r": 3, "rank_pattern": {r".*\.gate_up_proj": 4, r".*\.experts\.down_proj": 2}}
W1 = "base_model.model.model.layers.1.mlp.experts.w1"
ROOT = "base_model.model.model.layers.1.mlp"


def table(format: str, **adapter: object) -> dict[str, tuple[tuple[int, ...], str]]:
    given = {"rank": {"routed_experts": 2, "default": 3}, "alpha": 6} | adapter
    factors = build_inventory(load_glm_config("tiny"), AdapterConfig(**given), "float32").factors
    return {entry.key: (entry.shape, "F32") for entry in file_entries(factors, format)}


@pytest.mark.parametrize("format", FORMATS)
def test_the_order_of_the_keys_means_nothing(format: str) -> None:
    shapes = table(format)
    found = recover(dict(reversed(shapes.items())), DOCUMENT, "file")
    assert found == recover(shapes, DOCUMENT, "file")
    assert found.format == format


def test_xorls_spelling_of_the_head_is_the_head() -> None:
    shapes = table("sglang_shared_outer")
    renamed = {
        key.replace("lm_head.lora_A.weight", "lm_head.lora_embedding_A").replace(
            "lm_head.lora_B.weight", "lm_head.lora_embedding_B"
        ): value
        for key, value in shapes.items()
    }
    found = recover(renamed, DOCUMENT, "file")
    assert found.factors == recover(shapes, DOCUMENT, "file").factors
    assert found.spelled["base_model.model.lm_head.lora_A.weight"].endswith("lora_embedding_A")


def changed(format: str, remove: str = "", **added: tuple[tuple[int, ...], str]) -> Shapes:
    return {k: v for k, v in table(format).items() if not remove or remove not in k} | added


WRONG: list[tuple[Shapes, str]] = [
    ({}, "holds no tensor"),
    (changed("hf_peft", x=((1,), "F32")), "holds x, which is no LoRA factor"),
    ({"base_model.model.model.norm.weight": ((4,), "F32")}, "is no LoRA factor"),
    ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ((4, 4), "F32")}, "is no LoRA factor"),
    ({"base_model.model.model.layers.1.mlp.experts.3.x_proj.lora_A.weight": ((4, 4), "F32")}, "is no LoRA factor"),
    ({"base_model.model.model.layers.1.mlp.gate.lora_A.weight": ((4, 4), "F32")}, "is no LoRA factor"),
    ({"model.layers.0.self_attn.q_a_proj.lora_A.weight": ((4, 4), "F32")}, "is no LoRA factor"),
    ({"base_model.model.model.layers.0.self_attn.q_a_proj.lora_embedding_A": ((4, 4), "F32")}, "is no LoRA factor"),
    ({"base_model.model.lm_head.lora_A.weight": ((3, 128), "F64")}, "is F64, expected one of BF16"),
    ({"base_model.model.lm_head.lora_A.weight": ((3,), "F32")}, r"is \[3\], expected 2 axes"),
    ({"base_model.model.lm_head.lora_A.weight": ((0, 128), "F32")}, "none of size zero"),
    (changed("sglang_shared_outer", "lm_head.lora_B"), "lm_head has lora_A alone, lora_B is missing"),
    (changed("hf_peft", ".1.mlp.experts.3.up_proj.lora_B"), "1 tensors missing, 0 too many"),
    (changed("sglang_shared_outer") | table("hf_peft"), "mixes formats"),
    (changed("sglang_shared_outer", **{f"{W1}.lora_A.weight": ((8, 2, 128), "F32")}), r"is \[8, 2, 128\], expected \[1, 2,"),
    (changed("sglang_shared_outer", **{f"{W1}.lora_B.weight": ((7, 128, 2), "F32")}), r"is \[7, 128, 2\], expected \[8, 128,"),
    (changed("hf_peft", **{"base_model.model.lm_head.lora_B.weight": ((320, 5), "F32")}), "whose ranks 3 and 5 differ"),
    (changed("hf_peft", **{"base_model.model.lm_head.lora_B.weight": ((320, 3), "BF16")}), "of different dtypes"),
    (changed("hf_peft_fused", **{f"{ROOT}.experts.lora_A.weight": ((17, 128), "F32")}), "does not divide"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "complaint"), WRONG)
def test_what_fits_no_factor_is_refused_by_name(shapes: Shapes, complaint: str) -> None:
    with pytest.raises(AdapterError, match=complaint):
        recover(shapes, DOCUMENT, "file")


def test_a_fused_bank_needs_its_rank_from_the_configuration() -> None:
    for document, complaint in (
        ({}, "gives .*gate_up_proj rank None"),
        ({"r": 3}, "rank 3, expected a positive number, even"),
        ({"r": True}, "rank True"),
    ):
        with pytest.raises(AdapterError, match=complaint):
            recover(table("hf_peft_fused"), document, "file")


def test_a_parameter_alone_needs_the_targets_to_say_which_it_is() -> None:
    shapes = table("hf_peft_fused", targets=["*.mlp.experts.down_proj"])
    document = {"r": 2, "target_parameters": ["mlp.experts.down_proj"]}
    found = recover(shapes, document, "file")
    assert {factor.target.rpartition(".")[2] for factor in found.factors} == {"down_proj"}
    with pytest.raises(AdapterError, match="does not say which"):
        recover(shapes, {"r": 2}, "file")


def test_whole_experts_that_are_missing_at_the_end_are_seen_by_the_hash_not_here() -> None:
    """Nothing in keys and shapes says that there was an eighth expert; the base does, and the file's own record."""
    shapes = changed("hf_peft", "experts.7.")
    found = recover(shapes, DOCUMENT, "file")
    assert found.factors != recover(table("hf_peft"), DOCUMENT, "file").factors
