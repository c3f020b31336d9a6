"""megatron.training end to end: our entry and a foreign script train, are killed, resume, and read each other's checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron_xorl.errors import ConfigError
from tests.training.test_checkpoint import read_tensors
from tests.worlds import run_world, start_world

pytestmark = pytest.mark.dist

SEQ = 48
ADAPTER = "rank: 4\nalpha: 8\n"
WORDS = ["a", "bc def", "ghi jklm no", "p"]
MUTE = 3
"""Sample whose labels are taken away: a microbatch with nothing to train."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter config and four chats of unequal length."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "adapter.yaml").write_text(ADAPTER)
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": word},
                ]
            }
        )
        for word in WORDS
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def arguments(inputs: Path, model: Path, folder: Path, iterations: int = 5) -> list[str]:
    return [
        *("--hf-model", str(model), "--adapter-config", str(inputs / "adapter.yaml")),
        *("--chat-data", str(inputs / "train.jsonl"), "--seq-length", str(SEQ)),
        *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", str(iterations)),
        *(
            "--lr",
            "1e-2",
            "--min-lr",
            "1e-3",
            "--lr-decay-style",
            "cosine",
            "--lr-decay-iters",
            "20",
        ),
        *("--lr-warmup-iters", "2", "--weight-decay", "0.01", "--clip-grad", "1.0"),
        *(
            "--adam-beta2",
            "0.95",
            "--metrics",
            str(folder / "metrics.jsonl"),
            "--log-interval",
            "1",
        ),
        *("--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")),
        *("--save-interval", "2"),
    ]


def ours(argv: list[str], die_at: int | None = None) -> None:
    """Run our entry in this rank; rank 1 is killed when it has finished iteration ``die_at``."""
    from megatron_xorl.training.data import IGNORED, TrainingSamples
    from megatron_xorl.training.metrics import MetricsLog
    from megatron_xorl.training.pretrain import pretrain

    original = TrainingSamples.__getitem__

    def muted(self: Any, index: int) -> dict[str, torch.Tensor]:
        sample = dict(original(self, index))
        if index % 4 == MUTE:
            sample["labels"] = torch.full_like(sample["labels"], IGNORED)
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return sample

    TrainingSamples.__getitem__ = muted
    finished = MetricsLog.on_iteration

    def on_iteration(self: Any, *, iteration: int, **rest: Any) -> None:
        finished(self, iteration=iteration, **rest)
        if iteration == die_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsLog.on_iteration = on_iteration
    pretrain(argv)


def run(fn: Any, world: int, *args: Any, **named: Any) -> None:
    run_world(fn, world, *args, process_group=False, timeout=120, **named)


def killed(fn: Any, world: int, *args: Any, **named: Any) -> None:
    """Run a world whose rank 1 kills itself."""
    with start_world(fn, world, *args, process_group=False, **named) as ranks:
        assert ranks.wait(120)[1] == -signal.SIGKILL, ranks.log(1)[-3000:]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("iteration", "loss", "grad_norm", "lr")} for line in lines]


def differing(one: Path, other: Path) -> list[str]:
    """Keys of the tensors of two checkpoints that are not the same bytes."""
    first, second = read_tensors(one), read_tensors(other)
    assert first.keys() == second.keys()
    return [key for key in first if not torch.equal(first[key], second[key])]


@pytest.fixture(scope="module")
def whole(inputs: Path, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of 5 iterations, EP=2."""
    folder = tmp_path_factory.mktemp("whole")
    run(ours, 2, [*arguments(inputs, tiny_dir, folder), "--expert-model-parallel-size", "2"])
    return folder


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_equals_the_uninterrupted_one_bit_for_bit(
    inputs: Path, tiny_dir: Path, whole: Path, tmp_path: Path
) -> None:
    argv = [*arguments(inputs, tiny_dir, tmp_path), "--expert-model-parallel-size", "2"]
    killed(ours, 2, argv, die_at=3)
    assert (tmp_path / "checkpoints/latest").read_text() == "2\n"
    assert [line["iteration"] for line in metrics(tmp_path)] == [1, 2, 3]
    run(ours, 2, argv)
    assert metrics(tmp_path) == metrics(whole)
    assert [line["iteration"] for line in metrics(whole)] == list(range(1, 6))
    last, second = "checkpoints/iter_0000005", "checkpoints/iter_0000002"
    assert differing(tmp_path / last, whole / last) == []
    assert len(differing(whole / second, whole / last)) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity selective --recompute-modules mla_up_proj layernorm moe mlp",
    ],
)
def test_recompute_through_the_entry_trains_the_same_bits(
    inputs: Path, tiny_dir: Path, whole: Path, tmp_path: Path, recompute: str
) -> None:
    argv = [*arguments(inputs, tiny_dir, tmp_path), "--expert-model-parallel-size", "2"]
    run(ours, 2, [*argv, *recompute.split()])
    assert metrics(tmp_path) == metrics(whole)
    last = "checkpoints/iter_0000005"
    assert differing(tmp_path / last, whole / last) == []


def test_the_logged_loss_is_the_sum_over_trained_tokens_divided_by_their_number(
    inputs: Path, tiny_dir: Path, whole: Path
) -> None:
    from megatron_xorl.training.chat import ChatTokenizer, render
    from tests.oracle import hf_oracle

    model, tokenizer = hf_oracle(tiny_dir), ChatTokenizer(tiny_dir)
    per_sample = []
    for line in (inputs / "train.jsonl").read_text().splitlines()[:MUTE]:
        tokens, trained = render(json.loads(line)["messages"], tokenizer)
        # padded as the run's samples are: the selection of keys must not see what follows
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(tokens[1:]), reduction="none"
        )
        per_sample.append(losses[torch.tensor(trained[1:])].double())
    expected = torch.cat(per_sample).mean().item()
    logged = metrics(whole)[0]["loss"]
    assert logged == pytest.approx(expected, abs=1e-5)
    # The control: the mean of the samples' means, Megatron's default, is another number.
    assert len({len(losses) for losses in per_sample}) == MUTE
    assert abs(torch.stack([losses.mean() for losses in per_sample]).mean().item() - logged) > 1e-3


def test_a_microbatch_without_a_label_adds_nothing_to_loss_or_count() -> None:
    from megatron_xorl.training.pretrain import loss_function

    losses = torch.tensor([[1.0, 2.0, 4.0]])
    loss, count, report = loss_function(torch.zeros(1, 3), losses)
    assert (loss.item(), count.item(), report["lm loss"].tolist()) == (0.0, 0, [0.0, 0.0])
    loss, count, report = loss_function(torch.tensor([[1.0, 0.0, 1.0]]), losses)
    assert (loss.item(), count.item(), report["lm loss"].tolist()) == (5.0, 2, [5.0, 2.0])


# --- a script that knows only Megatron -------------------------------------------------------------------------------


def foreign(argv: list[str], die_at: int | None = None) -> None:
    """Run the foreign script in this rank; rank 1 is killed when it asks for the samples of iteration ``die_at``."""
    from tests.workers import foreign_pretrain

    original = foreign_pretrain.Samples.__getitem__

    def deadly(self: Any, index: int) -> dict[str, torch.Tensor]:
        if die_at is not None and index >= 2 * (die_at - 1) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, index)

    foreign_pretrain.Samples.__getitem__ = deadly
    foreign_pretrain.run(argv)


def environment(inputs: Path, model: Path) -> dict[str, str]:
    return {
        "MEGATRON_XORL_MODEL": str(model),
        "MEGATRON_XORL_ADAPTER_CONFIG": str(inputs / "adapter.yaml"),
    }


def saving(folder: Path, iterations: int = 6) -> list[str]:
    return [
        *("--train-iters", str(iterations), "--expert-model-parallel-size", "2"),
        *("--save", str(folder), "--load", str(folder), "--save-interval", "2"),
    ]


@pytest.fixture(scope="module")
def foreign_whole(inputs: Path, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the foreign script's uninterrupted run of 6 iterations, EP=2."""
    folder = tmp_path_factory.mktemp("foreign")
    run(foreign, 2, saving(folder), env=environment(inputs, tiny_dir))
    return folder


@pytest.mark.slow
def test_a_script_that_knows_only_megatron_is_killed_and_resumes_to_the_same_bits(
    inputs: Path, tiny_dir: Path, foreign_whole: Path, tmp_path: Path
) -> None:
    variables = environment(inputs, tiny_dir)
    killed(foreign, 2, saving(tmp_path), 4, env=variables)
    assert (tmp_path / "latest").read_text() == "2\n"
    run(foreign, 2, saving(tmp_path), env=variables)
    assert differing(tmp_path / "iter_0000006", foreign_whole / "iter_0000006") == []
    assert len(differing(foreign_whole / "iter_0000002", foreign_whole / "iter_0000006")) > 100


def base_bytes(checkpoint: Path, model: Path) -> set[str]:
    """Names of base tensors whose first 64 bytes stand somewhere in a checkpoint's files."""
    content = b"".join(path.read_bytes() for path in checkpoint.iterdir() if path.is_file())
    found = set()
    for shard in model.glob("*.safetensors"):
        with safe_open(str(shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                head = file.get_tensor(name).contiguous().reshape(-1)[:64].view(torch.uint8)
                if head.numel() >= 64 and head.numpy().tobytes()[:64] in content:
                    found.add(name)
    return found


@pytest.mark.slow
def test_its_checkpoint_holds_no_base_bytes(
    foreign_whole: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    directory = foreign_whole / "iter_0000006"
    tensors = read_tensors(directory)
    names = {key.partition("/")[2] for key in tensors if not key.startswith("rng/")}
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)
    size = sum(path.stat().st_size for path in directory.iterdir())
    envelope = 3072 * len(tensors)
    assert size < sum(value.nbytes for value in tensors.values()) + envelope
    assert base_bytes(directory, tiny_dir) == set()
    # The control: bytes of the base are found where they are.
    shutil.copytree(directory, tmp_path / "with base")
    shutil.copy(next(tiny_dir.glob("*-00001-*.safetensors")), tmp_path / "with base")
    assert "model.embed_tokens.weight" in base_bytes(tmp_path / "with base", tiny_dir)


def without_our_save(argv: list[str]) -> None:
    """Train and save with Megatron's own checkpoint."""
    import megatron_xorl.training.launch as launch
    from megatron_xorl.training.pretrain import pretrain

    launch.install_seams = lambda seams: None
    pretrain(argv)


@pytest.mark.slow
def test_megatrons_own_save_cannot_save_this_model(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyError, match=r"output_layer\.weight"):
        run(without_our_save, 1, arguments(inputs, tiny_dir, tmp_path, iterations=1))


@pytest.mark.slow
def test_its_checkpoint_is_continued_by_our_entry_and_the_reverse(
    inputs: Path, tiny_dir: Path, whole: Path, foreign_whole: Path, tmp_path: Path
) -> None:
    # The foreign run saved iteration 6; our entry trains the seventh from there.
    argv = arguments(inputs, tiny_dir, tmp_path, iterations=7)
    argv[argv.index("--load") + 1] = str(foreign_whole)
    argv[argv.index("--global-batch-size") + 1] = "2"
    extra = ["--expert-model-parallel-size", "2", "--override-opt-param-scheduler"]
    run(ours, 2, [*argv, *extra])
    assert [line["iteration"] for line in metrics(tmp_path)] == [7]
    # Our run saved iteration 5; the foreign script trains the sixth from there.
    back = tmp_path / "back"
    argv = [*saving(back, 6), "--global-batch-size", "4"]
    argv[argv.index("--load") + 1] = str(whole / "checkpoints")
    variables = environment(inputs, tiny_dir)
    run(foreign, 2, [*argv, "--override-opt-param-scheduler"], env=variables)
    for before, after in (
        (foreign_whole / "iter_0000006", tmp_path / "checkpoints/iter_0000007"),
        (whole / "checkpoints/iter_0000005", back / "iter_0000006"),
    ):
        saved, trained = (json.loads((d / "manifest.json").read_text()) for d in (before, after))
        steps = [{f["step"] for f in manifest["factors"].values()} for manifest in (saved, trained)]
        assert steps[1] == {next(iter(steps[0])) + 1}
        old, new = read_tensors(before), read_tensors(after)
        # One more update, not a fresh start: factors moved by no more than a few learning rates.
        moved = max(
            (old[key] - new[key]).abs().max().item() for key in old if key.startswith("lora/")
        )
        assert 0 < moved < 0.1
        kept = [key for key in old if key.startswith("exp_avg_sq/")]
        assert all(bool((new[key] >= 0.94 * old[key]).all()) for key in kept)
    assert not math.isnan(metrics(tmp_path)[0]["loss"])


# (what is changed in the foreign launch, what the refusal names)
WRONG = [
    pytest.param(
        ["-", "--calculate-per-token-loss"],
        "calculate_per_token_loss is False",
        "pass --calculate-per-token-loss",
        marks=pytest.mark.slow,
    ),
    (
        ["--kv-lora-rank", "64"],
        "kv_lora_rank is 64, the base's config.json says 128",
        "--kv-lora-rank 128",
    ),
    pytest.param(["--fp16"], "fp16 is True", "bf16 or fp32", marks=pytest.mark.slow),
    pytest.param(
        ["--moe-expert-capacity-factor", "1.0"],
        "moe_expert_capacity_factor is 1.0",
        "dropping tokens changes the model",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        ["-", "--use-distributed-optimizer"],
        "use_distributed_optimizer is False",
        "pass --use-distributed-optimizer",
        marks=pytest.mark.slow,
    ),
]


def refused(extra: list[str]) -> tuple[str, list[str]]:
    """Run the foreign script with a wrong flag; return the refusal and the modules that were built until then."""
    from megatron.core.models.gpt import GPTModel

    built: list[str] = []
    GPTModel.__init__ = lambda *_, **__: built.append("model")
    from tests.workers import foreign_pretrain

    if extra[0] == "-":
        foreign_pretrain.TINY_GLM.remove(extra[1])
        extra = extra[2:]
    try:
        foreign_pretrain.run([*extra, "--train-iters", "1"])
    except ConfigError as error:
        return str(error), built
    return "accepted", built


@pytest.mark.parametrize(("extra", "found", "remedy"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_flag_is_refused_with_its_reason_before_anything_is_built(
    inputs: Path, tiny_dir: Path, extra: list[str], found: str, remedy: str
) -> None:
    variables = environment(inputs, tiny_dir)
    ((message, built),) = run_world(refused, 1, extra, process_group=False, env=variables)
    assert found in message
    assert remedy in message
    assert built == []


def without_a_dependency() -> str:
    """Call the spec function where a module that it needs cannot be imported."""
    import sys

    from megatron.core.transformer.spec_utils import import_module

    sys.modules["megatron_xorl.training.launch"] = None
    function = import_module(["megatron_xorl.specs", "glm52_layer_spec"])
    try:
        function(None)
    except ImportError as error:
        return str(error)
    return "swallowed"


def swallowed() -> Any:
    """What Megatron's import makes of a spec module that raises ImportError itself."""
    import sys

    from megatron.core.transformer.spec_utils import import_module

    sys.modules["megatron_xorl.specs"] = None
    return import_module(["megatron_xorl.specs", "glm52_layer_spec"])


def test_a_missing_dependency_is_raised_when_the_spec_is_called_because_megatron_swallows_it_on_import() -> (
    None
):
    assert run_world(swallowed, 1, process_group=False) == [None]
    (message,) = run_world(without_a_dependency, 1, process_group=False)
    assert "megatron_xorl.training.launch" in message
