"""Bytes: of an adapter in training and of a base checkpoint."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.plan.adapter_bytes import adapter_bytes
from megatron_xorl.plan.checkpoint_bytes import checkpoint_bytes
from megatron_xorl.weights.names import hf_tensors

GLM = load_glm_config("glm-5.2")


def test_rank_64_costs_the_published_bytes() -> None:
    spent = adapter_bytes(build_inventory(GLM, AdapterConfig(rank=64, alpha=64)))["total"]
    assert round(spent.factors / 1e9, 2) == 16.40
    assert round(spent.masters / 1e9, 1) == 32.8
    assert spent.moments == 2 * spent.masters
    assert spent.total == spent.factors + spent.masters + spent.moments


def test_what_does_not_train_has_neither_master_nor_moments() -> None:
    spent = adapter_bytes(
        build_inventory(GLM, AdapterConfig(rank=64, alpha=64, scope="shared_experts"))
    )
    assert spent["routed_experts"].factors > 0
    assert (spent["routed_experts"].masters, spent["routed_experts"].moments) == (0, 0)
    assert spent["total"].masters == spent["shared_experts"].masters > 0


def test_float32_factors_need_no_second_copy() -> None:
    spent = adapter_bytes(build_inventory(GLM, AdapterConfig(rank=1, alpha=1), dtype="float32"))[
        "total"
    ]
    assert spent.masters == 0
    assert spent.moments == 2 * spent.factors


def test_the_report_of_a_checkpoint_is_what_lies_on_the_disk(tiny_dir: Path) -> None:
    report = checkpoint_bytes(hf_tensors(load_glm_config(tiny_dir)))
    tensors = size = 0
    for file in tiny_dir.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                tensor = shard.get_tensor(name)
                tensors, size = tensors + 1, size + tensor.nbytes
    stored = report["hf_tensors"] + report["scale_tensors"]
    assert (stored, report["bytes"]["total"]) == (tensors, size)
    assert report["bytes"]["total"] == sum(report["bytes"]["by_region"].values())


def test_glm_5_2_is_the_published_size() -> None:
    report = checkpoint_bytes(hf_tensors(GLM))
    assert (report["hf_tensors"], report["scale_tensors"]) == (59_585, 59_044)
    assert round(report["bytes"]["total"] / 2**30) == 704
    assert round(report["parameters"]["total"] / 1e9) == 753
