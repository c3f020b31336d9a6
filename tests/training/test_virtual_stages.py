"""Virtual pipeline stages: two chunks a rank, interleaved, train as one process does and share its checkpoints.

Twenty steps of them are rows of ``tests/layouts/rows.py``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.config.stages import interleaving_problem
from megatron_xorl.convert.tiny import tiny_config, tiny_tensors
from megatron_xorl.convert.tiny_tokenizer import write_tokenizer
from megatron_xorl.errors import LayoutError
from megatron_xorl.parallel.cpu import use_cpu
from megatron_xorl.parallel.groups import initialize
from megatron_xorl.training.arguments import model_arguments, without_virtual_stages
from megatron_xorl.weights.writer import write_checkpoint
from tests.training.harness import Job, run_layout
from tests.training.test_checkpoint import read_tensors
from tests.training.test_pipeline import agree
from tests.training.test_pretrain import arguments, differing, inputs, metrics, ours, run
from tests.worlds import run_world

__all__ = ["inputs"]  # a fixture

pytestmark = pytest.mark.dist

ADAPTER = {"rank": 4, "alpha": 8}
VIRTUAL = {"pp": 2, "vpp": 2}
SCHEDULE = ["full", "full", "full", "shared", "full"]
"""Four layers that a stage can begin on; the third stage has two layers."""


def write_model(folder: Path) -> Path:
    """The tiny checkpoint with five layers on :data:`SCHEDULE`."""
    raw = tiny_config() | {"indexer_types": SCHEDULE, "num_hidden_layers": len(SCHEDULE)}
    for key in ("index_topk_freq", "index_skip_topk_offset", "mlp_layer_types", "layer_types"):
        raw.pop(key, None)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    write_checkpoint(folder, tiny_tensors(GlmConfig.from_dict(raw, "test"), 0), max_bytes=2**30)
    return folder


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deep") / "model")


def held_layers(directory: str) -> list[list[int]]:
    """Layers of this rank's chunks."""
    use_cpu()
    initialize(**VIRTUAL)
    from megatron_xorl.training.model import load_chunks, load_model

    with pytest.raises(LayoutError, match="2 virtual pipeline stages and load_model builds one"):
        load_model(directory)
    chunks = load_chunks(directory)
    assert chunks[0].config is chunks[1].config
    return [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]


def test_a_rank_holds_every_second_stage(deep_dir: Path) -> None:
    assert run_world(held_layers, 2, str(deep_dir)) == [[[0], [2, 3]], [[1], [4]]]


def test_a_step_on_two_ranks_of_two_chunks_equals_one_process(deep_dir: Path) -> None:
    job = Job(str(deep_dir), ADAPTER, steps=1, keep=(1,))
    one = run_layout(job)
    two = run_layout(replace(job, layout=VIRTUAL, world=2), states=one.states)
    agree(one, two)
    # Nothing is held twice: every chunk has its own layers, under their logical names.
    assert two.copies == 0
    assert two.end.keys() == one.end.keys()


SIZES = [
    *("--pipeline-model-parallel-size", "2"),
    *("--num-virtual-stages-per-pipeline-rank", "2"),
]


@pytest.mark.layouts
def test_our_entry_saves_and_resumes_virtual_stages_exactly_and_one_process_reads_them(
    inputs: Path, deep_dir: Path, tmp_path: Path
) -> None:
    whole, again, alone = (tmp_path / name for name in ("whole", "again", "alone"))
    whole.mkdir()
    run(ours, 2, [*arguments(inputs, deep_dir, whole), *SIZES, "--check-replicas", "2"])
    # From iteration 2 on: the same layout, then one process.
    for folder, world, sizes in ((again, 2, SIZES), (alone, 1, [])):
        shutil.copytree(whole / "checkpoints/iter_0000002", folder / "checkpoints/iter_0000002")
        (folder / "checkpoints/latest").write_text("2\n")
        run(ours, world, [*arguments(inputs, deep_dir, folder), *sizes])
    later = metrics(whole)[2:]
    assert metrics(again) == later and len(later) == 3
    last = "checkpoints/iter_0000005"
    assert differing(again / last, whole / last) == []
    for one, two in zip(metrics(alone), later, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    # The same keys and shapes, whatever the chunks.
    found, expected = (read_tensors(folder / last) for folder in (whole, alone))
    state = {key for key in expected if not key.startswith("rng/")}
    assert state == {key for key in found if not key.startswith("rng/")}
    assert all(found[key].shape == expected[key].shape for key in state)


def test_microbatches_that_the_interleaved_schedule_cannot_take_are_refused() -> None:
    assert interleaving_problem(4, 2, 2) is None
    assert interleaving_problem(3, 2, 1) is None
    assert "3 microbatches a step on pp 2 with 2 virtual stages each" in str(
        interleaving_problem(3, 2, 2)
    )
    assert "nearest legal: 2, 4" in str(interleaving_problem(3, 2, 2))
    assert "vpp 2 with pp 1" in str(interleaving_problem(4, 1, 2))
    with pytest.raises(LayoutError, match="vpp=2 with pp=1"):
        run_world(without_pipeline, 1)


def without_pipeline() -> None:
    use_cpu()
    initialize(vpp=2)


def test_the_entry_turns_virtual_stages_into_a_legal_cut() -> None:
    glm = load_glm_config("glm-5.2")
    words = ["--lr", "1", *SIZES]
    written = model_arguments(glm, words)
    layout = written[written.index("--pipeline-model-parallel-layout") + 1]
    assert layout == "Et*18|t*20|t*20|t*20L"
    assert without_virtual_stages(words) == ["--lr", "1", *SIZES[:2]]
    assert without_virtual_stages([*SIZES[:2], f"{SIZES[2]}=2"]) == SIZES[:2]
    # With a cut of the user's, or without a pipeline, Megatron is to judge.
    for kept in (SIZES[2:], [*SIZES, "--pipeline-model-parallel-layout", "Et|tL"]):
        assert without_virtual_stages(kept) == kept
    with pytest.raises(LayoutError, match="pp 11 with 2 virtual stages each"):
        model_arguments(glm, [SIZES[0], "11", *SIZES[2:]])
