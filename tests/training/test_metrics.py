"""metrics.jsonl: one line an iteration, also when a run is killed and resumed."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.training import metrics as product
from megatron_xorl.training.metrics import MetricsLog, drop_iterations


class OneRank:
    """torch.distributed as the log sees it."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def _start(rank: int = 0, world: int = 1) -> MetricsLog:
        monkeypatch.setattr(product, "dist", OneRank(rank, world))
        path = tmp_path / "run" / "metrics.jsonl"
        return MetricsLog(
            Namespace(metrics=str(path), global_batch_size=4, seq_length=32, train_iters=9)
        )

    return _start


def iterate(log: MetricsLog, *iterations: int, loss: float = 0.1) -> None:
    for iteration in iterations:
        log.on_iteration(
            iteration=iteration, losses={"lm loss": loss}, learning_rate=1e-3, grad_norm=0.5
        )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_promised_keys_and_every_digit(start: Any) -> None:
    log = start()
    iterate(log, 1, loss=1 / 3)
    (line,) = read(log.path)
    assert list(line) == ["iteration", "loss", "grad_norm", "lr", "tokens_per_s"]
    assert (line["loss"], line["grad_norm"], line["lr"]) == (1 / 3, 0.5, 1e-3)
    assert line["tokens_per_s"] > 0


def test_a_resumed_run_replaces_the_iterations_it_trains_again(start: Any) -> None:
    iterate(start(), 1, 2, 3, 4, 5, loss=1.0)
    again = start()
    iterate(again, 4, 5, 6, loss=2.0)
    lines = read(again.path)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [1.0] * 3 + [2.0] * 3
    assert [path.name for path in again.path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_line_that_a_killed_run_left_unfinished_goes(start: Any) -> None:
    log = start()
    iterate(log, 1, 2)
    with open(log.path, "a") as stream:
        stream.write('{"iteration": 3, "lo')
    iterate(start(), 3, 4)
    assert [line["iteration"] for line in read(log.path)] == [1, 2, 3, 4]


def test_dropping_stops_before_the_given_iteration_and_without_a_file_does_nothing(
    start: Any, tmp_path: Path
) -> None:
    log = start()
    iterate(log, 1, 2, 3)
    drop_iterations(log.path, 4)
    assert len(read(log.path)) == 3
    drop_iterations(log.path, 1)
    assert read(log.path) == []
    drop_iterations(tmp_path / "none", 1)
    assert not (tmp_path / "none").exists()


def test_only_the_last_rank_writes_and_only_where_the_loss_is_known(start: Any) -> None:
    first = start(rank=0, world=2)
    iterate(first, 1)
    first.on_iteration(iteration=1, losses={}, learning_rate=None, grad_norm=None)
    assert not first.path.exists()
    last = start(rank=1, world=2)
    last.on_iteration(iteration=1, losses={"lm loss": math.inf}, learning_rate=None, grad_norm=None)
    assert read(last.path)[0]["grad_norm"] is None


def test_without_a_file_nothing_is_written(start: Any, tmp_path: Path) -> None:
    start()
    log = MetricsLog(Namespace(metrics=None, global_batch_size=1, seq_length=1, train_iters=1))
    iterate(log, 1)
    assert list(tmp_path.iterdir()) == []
