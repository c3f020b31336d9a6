"""A job whose ranks would compute FP8 products differently does not start, and says which ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_xorl.training.forward_agreement import _ranges
from tests.worlds import run_world

pytestmark = pytest.mark.dist


def _started(model: Path, adapter: Path, last_rank: dict[str, str], agreed: bool) -> Any:
    """Launch with variables that only the last rank has: the forward that came of it, or the error."""
    import os

    import torch

    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.fp8.engine import forward_record, use_fp8
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize()
    import megatron_xorl.training.launch as product
    from megatron_xorl.specs import transformer_config
    from megatron_xorl.training.arguments import RULES

    if dist.get_rank() == dist.get_world_size() - 1:
        os.environ.update(last_rank)
    if not agreed:
        product.use_fp8_everywhere = use_fp8
    arguments = {rule.name: rule.allowed[0] for rule in RULES} | {
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "seq_length": 64,
        "num_layers": 4,
        "seed": 1234,
        "hf_model": str(model),
        "adapter_config": str(adapter),
    }
    product.get_args = lambda: SimpleNamespace(**arguments)
    product.install_seams = lambda seams: None
    transformer = transformer_config(load_glm_config(model), dtype=torch.float32)
    try:
        product.launch_for(SimpleNamespace(pre_wrap_hooks=[], transformer=transformer))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return forward_record()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter.yaml"
    path.write_text("rank: 2\nalpha: 4\n")
    return path


NO_COMPILER = {"CXX": "a-compiler-that-is-not-here"}


@pytest.mark.parametrize(
    ("last_rank", "says"),
    [
        (NO_COMPILER, ("reference, mode w8a16 on rank 1", "a-compiler-that-is-not-here")),
        ({"MEGATRON_XORL_FP8_MODE": "w8a8"}, ("backend cpu, mode w8a8 on rank 1",)),
        (NO_COMPILER | {"MEGATRON_XORL_FP8_BACKEND": "cpu"}, ("none on rank 1", "no C++ compiler")),
    ],
    ids=["falls back", "another mode", "cannot run at all"],
)
def test_a_rank_that_differs_stops_every_rank_with_ranks_and_backends_named(
    last_rank: dict[str, str], says: tuple[str, ...], tiny_dir: Path, adapter: Path
) -> None:
    found = run_world(_started, 2, tiny_dir, adapter, last_rank, True)
    assert found[0] == found[1]
    for text in ("PlatformError", "backend cpu, mode w8a16 on rank 0", *says, "--fp8-backend"):
        assert text in found[0], found[0]


def test_ranks_that_agree_start_and_without_the_check_a_mixture_would(
    tiny_dir: Path, adapter: Path
) -> None:
    fast, slow = ({"mode": "w8a16", "backend": name} for name in ("cpu", "reference"))
    assert run_world(_started, 2, tiny_dir, adapter, {}, True) == [fast, fast]
    assert run_world(_started, 2, tiny_dir, adapter, NO_COMPILER, False) == [fast, slow]


def test_many_ranks_are_named_by_ranges() -> None:
    assert _ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
