"""The loss of the bare base and the step-one loss under each scope, all in one process group.

The one idea: a scope says what trains, not what is computed. With B zero every scope must give the
base's loss bit for bit, so each loss is computed as training computes it: the first global batch of
the run, Megatron's microbatches, the same loss function, the same reduction. Prints one JSON line.

    torchrun --nproc-per-node 2 examples/password_lora/scopes.py examples/password_lora/run.yaml
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_xorl as mx
from megatron_xorl.adapters.scopes import SCOPES
from megatron_xorl.training.chat import ChatTokenizer
from megatron_xorl.training.data import ChatDataset, TrainingSamples, check_batches
from megatron_xorl.training.pretrain import forward_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def first_batch(run: mx.RunConfig, rank: int, size: int) -> list[dict[str, Tensor]]:
    """This data-parallel rank's microbatches of step one, as Megatron's sampler deals them."""
    micro = run.batch.micro
    count = check_batches(micro=micro, global_batch=run.batch.global_, data_parallel=size)
    data = ChatDataset(
        run.data.train,
        ChatTokenizer(run.model.path),
        seq_length=run.data.seq_length,
        truncate=run.data.truncate,
    )
    samples = TrainingSamples(data, steps=1, global_batch=run.batch.global_, repeat=run.data.repeat)
    starts = [(number * size + rank) * micro for number in range(count)]
    rows = [[samples[start + offset] for offset in range(micro)] for start in starts]
    return [{key: torch.stack([row[key] for row in batch]) for key in batch[0]} for batch in rows]


def training_loss(
    model: nn.Module, batches: list[dict[str, Tensor]], group: dist.ProcessGroup
) -> float:
    """Mean loss over the trained tokens of the global batch."""
    iterator: Iterator[dict[str, Tensor]] = iter(batches)
    total = torch.zeros(2)
    for _ in batches:
        losses, reduce = forward_step(iterator, model)
        total = total + reduce(losses)[2]["lm loss"].cpu()
    total = total.to(torch.cuda.current_device())
    dist.all_reduce(total, group=group)
    return float(total[0] / total[1])


def measure(run: mx.RunConfig) -> dict[str, object]:
    """Losses by scope, each from a model built afresh, and how many factors train under it."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    batches = first_batch(
        run, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    )
    losses, trains = {}, {}
    for scope in ("base", *SCOPES):
        model = mx.load_model(run.model.path, dtype=DTYPES[run.model.dtype])
        if scope != "base":
            adapter = mx.AdapterConfig(**(run.adapter.to_dict() | {"glm52_lora_scope": scope}))
            trains[scope] = len(mx.attach_adapters(model, adapter, seed=run.seed).trainable)
        losses[scope] = training_loss(model, batches, group)
        del model
    return {"losses": losses, "trainable_factors": trains, "equal": len(set(losses.values())) == 1}


def main() -> None:
    """Measure on every rank, print on the first; exit 1 unless all five losses are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="run configuration, a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    run = mx.load_run_config(arguments.run, arguments.set)
    if not torch.cuda.is_available():
        mx.use_cpu()
    sizes = run.parallel
    mx.initialize(sizes.tp, sizes.pp, sizes.ep, sizes.etp, sizes.cp, seed=run.seed)
    report = measure(run)
    if dist.get_rank() == 0:
        print(json.dumps(report))
    mx.shutdown()
    sys.exit(0 if report["equal"] else 1)


if __name__ == "__main__":
    main()
