"""``adapter verify``: what is right passes, and each way of being silently wrong is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worlds import run_world

pytestmark = pytest.mark.dist

FORMATS = ("sglang_shared_outer", "hf_peft", "hf_peft_fused")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
REGIONS = {"attention", "dense_mlp", "shared_experts", "routed_experts", "lm_head"}
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def written(base: Path, out: Path, format: str, **changes: Any) -> Path:
    """An adapter of the base with drawn values in every factor that trains."""
    from megatron_xorl.adapters.inventory import build_inventory
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.weights.adapter_writer import write_adapter
    from megatron_xorl.weights.fingerprint import fingerprint
    from megatron_xorl.weights.opening import open_checkpoint
    from tests.workers.adapter_job import drawn

    given = {"rank": {"routed_experts": 2, "default": 3}, "alpha": 6} | changes
    adapter, glm = AdapterConfig(**given), load_glm_config(base)
    factors = build_inventory(glm, adapter, dtype="float32").trainable
    return write_adapter(
        out,
        factors,
        ((factor.name, drawn(1, "master", factor) * 0.05) for factor in factors),
        adapter,
        base_model=str(base),
        base_fingerprint=fingerprint(glm, open_checkpoint(base)),
        format=format,
    )


def verify_all(directories: list[Path], base: Path) -> list[Any]:
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_verify import verify_adapter

    use_cpu()
    initialize()
    found = []
    for directory in directories:
        try:
            found.append(verify_adapter(directory, base))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def verified(directories: list[Path], base: Path) -> list[Any]:
    (found,) = run_world(verify_all, 1, directories, base, timeout=240)
    return found


def test_every_format_passes_in_every_region_and_through_peft(
    tiny_dir: Path, tmp_path: Path
) -> None:
    directories = [written(tiny_dir, tmp_path / format, format) for format in FORMATS]
    for format, found in zip(FORMATS, verified(directories, tiny_dir), strict=True):
        assert found["passed"], found
        assert found["format"] == format
        assert found["regions"].keys() == REGIONS
        assert ("peft" in found) == (format != "sglang_shared_outer")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"rslora": True}, {"rank": 2, "scope": "routed_experts"}])
def test_rslora_and_a_narrow_scope_pass_through_peft(
    tiny_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    directories = [written(tiny_dir, tmp_path / f, f, **changes) for f in FORMATS[1:]]
    for found in verified(directories, tiny_dir):
        assert found["passed"], found


@pytest.mark.slow
def test_each_projection_alone_passes(tiny_dir: Path, tmp_path: Path) -> None:
    banks = [f"*.mlp.experts.{leaf}_proj" for leaf in ("gate", "up", "down")]
    targets = [
        *ATTENTION,
        *banks,
        "*.shared_experts.up_proj",
        "model.layers.0.mlp.gate_proj",
        "lm_head",
    ]
    directories = [
        written(tiny_dir, tmp_path / str(number), FORMATS[0], targets=[target])
        for number, target in enumerate(targets)
    ]
    for target, found in zip(targets, verified(directories, tiny_dir), strict=True):
        assert found["passed"], (target, found)
        assert len(found["regions"]) == 1


# --- wrong ones -----------------------------------------------------------------------------------------------------


def zero_b(part: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        for key in tensors:
            if part in key and "lora_B" in key:
                tensors[key].zero_()
        save_file(tensors, directory / WEIGHTS)

    return change


def config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / CONFIG
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return edit


LEAVES = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]


def leaf_targets(document: dict[str, Any]) -> None:
    """What most trainers write: PEFT moves three of the leaves to the routed experts and drops the rest of them."""
    document.update(
        target_modules=LEAVES, target_parameters=None, rank_pattern={}, alpha_pattern={}
    )


def regular_expression(document: dict[str, Any]) -> None:
    leaf_targets(document)
    document["target_modules"] = (
        r".*\.(gate_proj|up_proj|down_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)$"
    )


CONTROLS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("sglang_shared_outer", zero_b("shared_experts"), "shared_experts"),
    ("sglang_shared_outer", zero_b("experts.w"), "routed_experts"),
    ("hf_peft", config(leaf_targets), "peft"),
    ("hf_peft", config(regular_expression), "peft"),
]


@pytest.mark.parametrize(("format", "damage", "region"), CONTROLS)
def test_a_region_that_does_nothing_and_what_peft_drops_fail(
    tiny_dir: Path, tmp_path: Path, format: str, damage: Callable[[Path], None], region: str
) -> None:
    directory = written(tiny_dir, tmp_path / "a", format, rank=2)
    damage(directory)
    (found,) = verified([directory], tiny_dir)
    assert not found["passed"]
    failed = {name for name, result in found["regions"].items() if not result["passed"]}
    if region == "peft":
        assert failed == set()
        assert found["peft"]["max_abs"] > 1e-3
    else:
        assert failed == {region}
        assert "its factors do nothing" in found["regions"][region]["reason"]


def test_the_shared_form_given_to_peft_changes_no_routed_expert(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """Why there are other forms: PEFT warns of missing keys and goes on without the banks."""
    import warnings

    from peft import PeftModel

    from tests.oracle import hf_oracle

    shared = written(tiny_dir, tmp_path / "a", FORMATS[0], scope="routed_experts", rank=2)
    expanded = written(tiny_dir, tmp_path / "b", FORMATS[1], scope="routed_experts", rank=2)
    shutil.copy(expanded / CONFIG, shared / CONFIG)
    ids = torch.arange(40)[None]
    changes = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = hf_oracle(tiny_dir)(ids).logits
        for directory in (shared, expanded):
            adapted = PeftModel.from_pretrained(hf_oracle(tiny_dir), str(directory)).eval()
            changes.append(float((adapted(ids).logits - base).abs().max()))
    assert changes[0] == 0
    assert changes[1] > 1e-2


def test_another_base_is_refused(tiny_dir: Path, tiny128_dir: Path, tmp_path: Path) -> None:
    directory = written(tiny_dir, tmp_path / "a", FORMATS[0])
    (found,) = verified([directory], tiny128_dir)
    assert found.startswith("AdapterError")
    assert "it is of another base or rank" in found or "trained on a base" in found
