"""What a launch needs to know: where base and adapters come from, and that one run's hooks are registered once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worlds import run_world

pytestmark = pytest.mark.dist

GOOD = "rank: 2\nalpha: 4\n"


def launches(model: Path, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Call ``launch_for`` once a case, with arguments and variables of the case; return what came of each."""
    import os

    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize()
    import torch

    import megatron_xorl.training.launch as product
    from megatron_xorl.specs import transformer_config
    from megatron_xorl.training.arguments import RULES

    installed: list[Any] = []
    product.install_seams = installed.append
    glm = load_glm_config(model)
    good = {rule.name: rule.allowed[0] for rule in RULES} | {
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "seq_length": 48,
        "num_layers": 4,
        "seed": 1234,
    }
    found: dict[str, Any] = {}
    for name, case in cases.items():
        os.environ.update(case.get("environment", {}))
        product.get_args = lambda case=case: SimpleNamespace(**(good | case.get("arguments", {})))
        transformer = transformer_config(glm, dtype=torch.float32, **case.get("transformer", {}))
        config = SimpleNamespace(pre_wrap_hooks=[], transformer=transformer)
        installed.clear()
        try:
            launch = product.launch_for(config)
            again = product.launch_for(config)
            found[name] = {
                "model": str(launch.model_dir),
                "rank": launch.adapter.rank,
                "same": launch is again,
                "hooks": len(config.pre_wrap_hooks),
                "seams": len(installed),
            }
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            found[name] += f" [{len(config.pre_wrap_hooks)} hooks, {len(installed)} seams]"
        for variable in case.get("environment", {}):
            del os.environ[variable]
    return found


def test_base_and_adapters_come_from_arguments_then_the_environment_and_are_checked(
    tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "other.yaml").write_text("rank: 3\nalpha: 4\n")
    (tmp_path / "kl.yaml").write_text(GOOD + "indexer: kl\n")
    given = {"hf_model": str(tiny_dir), "adapter_config": str(tmp_path / "good.yaml")}
    variables = {
        "MEGATRON_XORL_MODEL": str(tiny_dir),
        "MEGATRON_XORL_ADAPTER_CONFIG": str(tmp_path / "other.yaml"),
    }
    cases = {
        "arguments": {"arguments": given},
        "environment": {"environment": variables},
        "both": {"arguments": given, "environment": variables},
        "no base": {"environment": {"MEGATRON_XORL_ADAPTER_CONFIG": "a.yaml"}},
        "no adapter": {"environment": {"MEGATRON_XORL_MODEL": str(tiny_dir)}},
        "another model": {
            "arguments": given,
            "transformer": {"num_layers": 3, "moe_layer_freq": [0, 1, 1]},
        },
        "a refused argument": {"arguments": given | {"fp16": True}},
        "not built": {"arguments": given | {"adapter_config": str(tmp_path / "kl.yaml")}},
        "no such file": {"arguments": given | {"adapter_config": str(tmp_path / "none.yaml")}},
    }
    (found,) = run_world(launches, 1, tiny_dir, tmp_path, cases)
    once = {"model": str(tiny_dir), "same": True, "hooks": 1, "seams": 1}
    assert found["arguments"] == found["both"] == once | {"rank": 2}
    assert found["environment"] == once | {"rank": 3}
    refused = {
        "no base": ("ConfigError", "pass --hf-model or set MEGATRON_XORL_MODEL"),
        "no adapter": ("ConfigError", "pass --adapter-config or set MEGATRON_XORL_ADAPTER_CONFIG"),
        "another model": ("ConfigError", "num_layers is 3, the base's config.json says 4"),
        "a refused argument": ("ConfigError", "fp16 is True"),
        "not built": ("AdapterError", "indexer is kl"),
        "no such file": ("ConfigError", "none.yaml"),
    }
    for name, (kind, text) in refused.items():
        assert found[name].startswith(kind), found[name]
        assert text in found[name]
        assert found[name].endswith("[0 hooks, 0 seams]")


def other_schedule(model: Path, folder: Path, decay: int) -> str:
    """Resume a saved job through the launch with a scheduler of another length."""
    import megatron_xorl.training.launch as product
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.weights.reader import HfCheckpoint
    from tests.workers.adapter_job import ADAPTER, Job

    job = Job(model, base=False)
    job.save(folder, 3)
    product.get_args = lambda: SimpleNamespace(
        load=str(folder), exit_on_missing_checkpoint=False, consumed_train_samples=0
    )
    launch = product.Launch(
        model_dir=model,
        glm=load_glm_config(model),
        adapter=AdapterConfig(**ADAPTER),
        checkpoint=HfCheckpoint(model),
        seed=1234,
        keep_last=None,
        base_fingerprint="base",
    )
    job.scheduler.use_checkpoint_opt_param_scheduler = False
    job.scheduler.lr_decay_steps = decay
    try:
        launch.load([job.model], job.optimizer, job.scheduler)
    except (
        KeyError
    ) as error:  # what only a launch puts into the manifest: the schedule was accepted before it
        return f"accepted, then {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_resume_on_another_schedule_is_refused_with_the_flag_that_allows_it(
    tiny_dir: Path, tmp_path: Path
) -> None:
    (same,) = run_world(other_schedule, 1, tiny_dir, tmp_path / "same", 20)
    assert same.startswith("accepted")
    (other,) = run_world(other_schedule, 1, tiny_dir, tmp_path / "other", 30)
    assert other.startswith("CheckpointError")
    assert "--override-opt-param-scheduler" in other
