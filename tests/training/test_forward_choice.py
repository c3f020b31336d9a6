"""A run's ``model.fp8_backend`` and ``fp8_mode``, from the file to the checkpoint and its resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_xorl.config.run import load_run_config
from megatron_xorl.errors import CheckpointError
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.training.run import adapter_path, check_run, pretrain_arguments
from tests.worlds import run_world

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def _run_file(folder: Path, model: Path, *, steps: int, megatron_args: Any = None, **fp8: str) -> Path:  # fmt: skip
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Kx7"}]
    (folder / "train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    document = {
        "model": {"path": str(model), "dtype": "fp32", **fp8},
        "adapter": {"rank": 2, "alpha": 4},
        "data": {"train": "train.jsonl", "seq_length": 48, "repeat": True},
        "optimizer": {"lr": 2e-3},
        "schedule": {"steps": 2, "warmup": 1},
        "batch": {"micro": 1, "global": 1},
        "checkpoint": {"interval": 1},
        "megatron_args": {"exit_interval": steps, **(megatron_args or {})},
        "output": "out",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return folder / "run.yaml"


def _trained(argv: list[str]) -> dict[str, str]:
    """Run the entry in this rank and return what its products ran on."""
    from megatron_xorl.fp8.engine import forward_record
    from megatron_xorl.training.pretrain import pretrain

    try:
        pretrain(argv)
    except SystemExit as done:  # Megatron's --exit-interval
        assert not done.code
    return forward_record()


def _train(path: Path) -> dict[str, str]:
    run = load_run_config(path)
    adapter = Path(adapter_path(run))
    adapter.parent.mkdir(exist_ok=True)
    adapter.write_text(yaml.safe_dump(run.adapter.to_dict()))
    found: dict[str, str] = run_world(
        _trained, 1, pretrain_arguments(run), process_group=False, timeout=120
    )[0]
    return found


def test_the_file_s_choice_computes_is_recorded_and_changes_only_when_that_is_allowed(
    tiny_dir: Path, tmp_path: Path
) -> None:
    slow = {"mode": "w8a8", "backend": "reference"}
    first = _run_file(tmp_path, tiny_dir, steps=1, fp8_backend="reference", fp8_mode="w8a8")
    assert _train(first) == slow
    saved = tmp_path / "out/checkpoints"
    assert json.loads((saved / "iter_0000001/manifest.json").read_text())["forward"] == slow

    other = {"fp8_backend": "cpu", "fp8_mode": "w8a16"}
    refusal = r"forward\.backend: checkpoint has 'reference', this run has 'cpu'; forward\.mode.*--allow-forward-change"
    changed = _run_file(tmp_path, tiny_dir, steps=2, **other)
    try:
        with pytest.raises(CheckpointError, match=refusal):
            check_run(load_run_config(changed), 1)
    finally:
        use_fp8()
    with pytest.raises(CheckpointError, match=refusal):  # a rank that was started by hand
        _train(changed)
    assert (saved / "latest").read_text() == "1\n"

    allowed = _run_file(
        tmp_path, tiny_dir, steps=2, megatron_args={"allow_forward_change": True}, **other
    )
    assert _train(allowed) == {"mode": "w8a16", "backend": "cpu"}
    assert json.loads((saved / "iter_0000002/manifest.json").read_text())["forward"] == {
        "mode": "w8a16",
        "backend": "cpu",
    }
