"""The two forms on disk: torch alone reads the plain one, each is converted into the other, bytes are those of the arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_xorl as mx
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.errors import CheckpointError
from megatron_xorl.plan.adapter_bytes import resume_bytes
from tests.training.test_checkpoint import SMALL, inventory, read_tensors
from tests.workers.adapter_job import Job, drawn
from tests.worlds import run_world

pytestmark = pytest.mark.dist

READER = """
import json, sys
sys.modules["megatron"] = sys.modules["megatron_xorl"] = None   # neither can be imported
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

directory, shapes, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
model = torch.nn.Module()
for name, shape in shapes.items():
    *path, leaf = name.split(".")
    module = model
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))
optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
options = StateDictOptions(flatten_optimizer_state_dict=True)
weights, state = get_state_dict(model, optimizer, options=options)
dcp.load({"model": weights, "optim": state}, checkpoint_id=directory)
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
found = {"before": {n: p.detach().clone() for n, p in model.named_parameters()}}
found["lr"] = {group["lr"] for group in optimizer.param_groups}
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
found["after"] = {n: p.detach().clone() for n, p in model.named_parameters()}
torch.save(found, out)
"""


def save_drawn(model: Path, root: Path, form: str, bf16: bool = False) -> None:
    job = Job(model, SMALL, base=False, bf16=bf16)
    job.fill(1)
    job.save(root, 3, form=form)


def test_torch_alone_reads_the_plain_form_and_goes_on_training(
    tiny_dir: Path, tmp_path: Path
) -> None:
    run_world(save_drawn, 2, tiny_dir, tmp_path, "dcp")
    factors = inventory(SMALL).factors
    script, out = tmp_path / "reader.py", tmp_path / "found.pt"
    script.write_text(READER)
    shapes = json.dumps({factor.name: factor.shape for factor in factors})
    command = [sys.executable, script, tmp_path / "iter_0000003", shapes, out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(out, weights_only=True)
    assert found["lr"] == {1e-3}  # the jobs' rate before the first step, not the reader's 9
    for factor in factors:
        value = torch.nn.Parameter(drawn(1, "master", factor))
        assert torch.equal(found["before"][factor.name], value)
        oracle = torch.optim.AdamW([value], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
        moments = {kind: drawn(1, kind, factor) for kind in ("exp_avg", "exp_avg_sq")}
        oracle.state[value] = {"step": torch.tensor(3.0)} | moments
        value.grad = torch.ones_like(value)
        oracle.step()
        assert torch.equal(found["after"][factor.name], value)


def convert(model: Path, root: Path, out: Path, form: str) -> None:
    mx.use_cpu()
    mx.initialize()
    mx.convert_checkpoint(root, out / "iter_0000003", form)


def load_state(model: Path, root: Path) -> dict[str, str]:
    job = Job(model, SMALL, base=False, bf16=True)
    torch.manual_seed(8)
    assert job.load(root) == 3
    return job.state()


@pytest.mark.parametrize(("first", "second"), [("torch_dist", "dcp"), ("dcp", "torch_dist")])
def test_each_form_is_converted_into_the_other_and_resumed_to_the_same_bits(
    tiny_dir: Path, tmp_path: Path, first: str, second: str
) -> None:
    run_world(save_drawn, 2, tiny_dir, tmp_path / "saved", first, True)
    run_world(convert, 1, tiny_dir, tmp_path / "saved", tmp_path / "there", second)
    run_world(convert, 1, tiny_dir, tmp_path / "there", tmp_path / "back", first)
    states = [
        run_world(load_state, 2, tiny_dir, tmp_path / name) for name in ("saved", "there", "back")
    ]
    assert states[0] == states[1] == states[2]
    one, again = (read_tensors(tmp_path / name / "iter_0000003") for name in ("saved", "back"))
    assert one.keys() == again.keys()
    assert all(torch.equal(one[key], again[key]) for key in one)
    manifests = [
        json.loads((tmp_path / n / "iter_0000003/manifest.json").read_text())
        for n in ("saved", "there")
    ]
    assert [manifest["form"] for manifest in manifests] == [first, second]
    keys = set(read_tensors(tmp_path / "there/iter_0000003"))
    assert ("optim.state.lm_head.lora_A.master_param" in keys) == (second == "dcp")
    with pytest.raises(CheckpointError, match=r"iter_0000003 exists; choose another output"):
        mx.convert_checkpoint(tmp_path / "saved", tmp_path / "back/iter_0000003", first)
    with pytest.raises(
        CheckpointError, match="no checkpoint form 'zip'; choose from torch_dist, dcp"
    ):
        mx.convert_checkpoint(tmp_path / "saved", tmp_path / "none", "zip")


# --- bytes --------------------------------------------------------------------------------------------------------------------

SCOPES = ("all", "moe", "shared_experts", "routed_experts")
GLM_RANK_64 = {
    "all": 114_823_905_280,
    "moe": 108_586_598_400,
    "shared_experts": 1_651_507_200,
    "routed_experts": 106_935_091_200,
}


def scoped(scope: str, rank: int) -> Any:
    return mx.AdapterConfig(rank=rank, alpha=rank, glm52_lora_scope=scope)


def save_scope(model: Path, root: Path, scope: str) -> None:
    Job(model, {"rank": 2, "alpha": 2, "glm52_lora_scope": scope}, base=False, bf16=True).save(
        root, 1
    )


@pytest.mark.parametrize("scope", SCOPES)
def test_a_checkpoint_s_bytes_are_14_a_parameter_of_the_scope_at_every_size(
    tiny_dir: Path, tmp_path: Path, scope: str
) -> None:
    full = build_inventory(mx.load_glm_config("glm-5.2"), scoped(scope, 64))
    total = resume_bytes(full)["total"]
    assert total.total == GLM_RANK_64[scope]
    assert (total.masters, total.moments) == (2 * total.factors, 4 * total.factors)
    run_world(save_scope, 1, tiny_dir, tmp_path, scope)
    small = build_inventory(mx.load_glm_config(tiny_dir), scoped(scope, 2), dtype="bfloat16")
    tensors = read_tensors(tmp_path / "iter_0000001")
    state = {key: tensor for key, tensor in tensors.items() if not key.startswith("rng/")}
    assert sum(tensor.nbytes for tensor in state.values()) == resume_bytes(small)["total"].total
    assert len(state) == 4 * len(small.trainable)
