"""One small training job on any parallel layout, in a form that layouts can be compared by.

The one idea: what is compared is *logical* (``tests.training.comparison``), so a new layout is one more
``Job``, with the one-process run as its reference::

    one = run_layout(job)
    two = run_layout(replace(job, layout={"ep": 2}, world=2), states=one.states)
    difference(one, two)

The job is Megatron's own: DistributedDataParallel, DistributedOptimizer, the forward-backward
schedule and ``finalize_model_grads``. Only the data and the loss function are the test's.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.comparison import Outcome, Piece, assemble, join_choices
from tests.worlds import run_world


@dataclass(frozen=True)
class Job:
    """What every layout runs alike, and the layout."""

    directory: str
    adapter: dict[str, Any]
    steps: int = 20
    keep: tuple[int, ...] = (1, 2, 10, 20)
    seq: int = 40
    global_batch: int = 2
    lr: float = 1e-3
    warmup: int = 10
    """Steps of linear warm-up, as in real runs: Adam's first steps turn the noise of near-zero gradients into whole steps."""
    layout: dict[str, int] = field(default_factory=dict)
    world: int = 1
    unreduced: str | None = None
    """A factor whose gradient is left out of the reduction over ranks, to see that it is noticed."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's transformer config."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further fields of DDP's config (overlap, bucket size, dtype of gradients)."""
    dtype: str = "float32"
    before: Callable[[], None] | None = None
    """Called on every rank before the model is built (a function of an importable module): what a negative control breaks."""


def use_one_process() -> None:
    """Make this process a CPU world of one; a second call changes nothing."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize()


def sample(step: int, index: int, seq: int) -> dict[str, Tensor]:
    """Sample ``index`` of global batch ``step``, with its number in the run and its tokens' places.

    Each has another number of labels, and some have none at all.
    """
    generator = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, 256, (1, seq + 1), generator=generator)
    trained = 0 if (step + index) % 5 == 4 else 5 + (7 * step + 11 * index) % (seq - 8)
    mask = torch.zeros(1, seq)
    mask[:, seq - trained :] = 1.0
    tokens, labels = ids[:, :-1], ids[:, 1:]
    number = torch.tensor([1000 * step + index])
    return {
        "tokens": tokens,
        "labels": labels,
        "mask": mask,
        "index": torch.tensor(index),
        "number": number,
        "places": torch.arange(seq).unsqueeze(0),
    }


def random_like(name: str, shape: tuple[int, ...]) -> Tensor:
    """A factor's full value that depends on its logical name alone: what every layout can agree on."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return draw / shape[-1] ** 0.5 * (0.3 if name.endswith("lora_B") else 1.0)


def randomise(model: Any) -> dict[str, Tensor]:
    """Give every factor of ``model`` its :func:`random_like` value; return the full values."""
    from megatron_xorl.layers.attach import named_factors

    full = {}
    with torch.no_grad():
        for name, (factor, piece, parameter) in named_factors(model).items():
            full[name] = random_like(name, factor.shape)
            parameter.copy_(piece.of(full[name]))
    return full


class Trainer:
    """Model, Megatron's DDP and optimizer of one rank."""

    def __init__(self, job: Job) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron_xorl.config.adapter import AdapterConfig
        from megatron_xorl.layers.attach import named_factors
        from megatron_xorl.training.model import load_chunks

        self.job = job
        self.chunks = load_chunks(
            job.directory,
            AdapterConfig(**job.adapter),
            getattr(torch, job.dtype),
            fields=job.fields,
        )
        self.module = self.chunks[0]
        if job.unreduced:
            named_factors(self.module)[job.unreduced][2].allreduce = False
        self.models = [
            DistributedDataParallel(
                chunk.config,
                DistributedDataParallelConfig(use_distributed_optimizer=True, **job.ddp),
                chunk,
                disable_bucketing=number > 0,  # as Megatron's training does
            )
            for number, chunk in enumerate(self.chunks)
        ]
        self.model = self.models[0]
        if job.ddp.get("overlap_grad_reduce"):
            no_sync = [model.no_sync for model in self.models]
            self.module.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.module.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=job.lr,
                adam_beta1=0.9,
                adam_beta2=0.95,
                weight_decay=0.01,
                clip_grad=1.0,
                use_distributed_optimizer=True,
                bf16=job.dtype == "bfloat16",
                params_dtype=getattr(torch, job.dtype),
                overlap_param_gather=job.ddp.get("overlap_param_gather", False),
            ),
            self.models,
        )
        self.factors = named_factors(self.chunks)
        self.dp = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )

    def forward_backward(self, step: int) -> float:
        """Leave the reduced gradients of global batch ``step``; return the mean loss of its trained tokens, on every rank."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        job, (rank, size) = self.job, self.dp
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        mine = [sample(step, index, job.seq) for index in range(rank, job.global_batch, size)]
        told = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(mine) for _ in self.models],
            model=self.models,
            num_microbatches=len(mine),
            seq_length=job.seq,
            micro_batch_size=1,
            forward_only=False,
        )
        total = torch.zeros(2, dtype=torch.float64)
        for part in told:
            total += part["loss"]
        dist.all_reduce(total)  # tensor ranks repeat each other, in both sums alike
        return (total[0] / total[1]).item()

    def update(self, step: int) -> tuple[bool, float, Any]:
        """Megatron's optimizer step at this step's learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * min(1.0, step / self.job.warmup)
        return self.optimizer.step()

    def norm(self) -> float:
        """Gradient norm as Megatron computes it."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def gradient_pieces(self) -> dict[str, Piece]:
        """The reduced gradients this rank owns: the optimizer's shards."""
        by_parameter = {
            parameter: (name, piece) for name, (_, piece, parameter) in self.factors.items()
        }
        out = {}
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for parameter in getattr(part, "model_param_gbuf_map", {}):
                where = part._get_model_param_range_map(parameter)["param"]
                name, piece = by_parameter[parameter]
                values = parameter.main_grad.view(-1)[where.start : where.end].clone()
                out[name] = (piece.ranges, where.start, where.end, values)
        return out

    def gather(self) -> None:
        """Finish what ``overlap_param_gather`` leaves to the next forward."""
        for model in self.models:
            if self.job.ddp.get("overlap_param_gather"):
                model.start_param_sync(force_sync=True)

    def factor_pieces(self) -> dict[str, Piece]:
        """Every factor as this rank's model holds it, gathered."""
        self.gather()
        return {
            name: (piece.ranges, 0, parameter.numel(), parameter.detach().reshape(-1).clone())
            for name, (_, piece, parameter) in self.factors.items()
        }

    def set_factors(self, full: dict[str, Tensor]) -> None:
        """Put full logical values in."""
        self.gather()
        with torch.no_grad():
            for name, (_, piece, parameter) in self.factors.items():
                parameter.copy_(piece.of(full[name]))


def _forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    from megatron_xorl.layers.context import own_part
    from megatron_xorl.layers.token_keys import dropout_keys

    batch = own_part(next(iterator))
    module = model.module
    module.current_sample = int(batch["index"])
    positions = torch.arange(batch["tokens"].shape[1]).unsqueeze(0)
    keys = None
    if module.adapter_config.dropout:
        keys = dropout_keys(batch["number"], batch["places"])
    losses = model(batch["tokens"], positions, keys, labels=batch["labels"])
    module.current_sample = None  # what backward computes again is not watched

    def reduce(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, count = (output.float() * batch["mask"]).sum(), batch["mask"].sum()
        told = torch.stack([loss.detach().double(), count.double()])
        return loss, count.to(torch.int), {"loss": told}

    return losses, reduce


def watch_choices(
    module: Any, seen: dict[tuple[int, int, str], Tensor] | None = None
) -> dict[tuple[int, int, str], Tensor]:
    """Record in ``seen``, from now on, ``(sample, layer, "index"|"route")`` -> bool ``[tokens of this rank, …]``."""
    from megatron.core import parallel_state

    from megatron_xorl.layers.indexer import Indexer
    from megatron_xorl.layers.router import GlmRouter

    seen = {} if seen is None else seen
    for layer in module.decoder.layers:
        number = layer.layer_number - 1

        def indexed(_: Any, __: Any, selected: Tensor, number: int = number) -> None:
            if module.current_sample is None:
                return
            keys = selected.shape[0] * parallel_state.get_context_parallel_world_size()
            seen[(module.current_sample, number, "index")] = index_sets(selected, keys)[0]

        def routed(_: Any, __: Any, output: Any, number: int = number) -> None:
            if module.current_sample is None:
                return
            seen[(module.current_sample, number, "route")] = output[1].clone()

        for part in layer.modules():
            if isinstance(part, Indexer):
                part.register_forward_hook(indexed)
            if isinstance(part, GlmRouter):
                part.register_forward_hook(routed)
    return seen


def index_sets(selected: Tensor, keys: int | None = None) -> Tensor:
    """bool ``[b, s, keys]`` (None: s) from a selection int64 ``[s, b, topk]`` in which -1 is unused."""
    keys = selected.shape[0] if keys is None else keys
    places = selected.transpose(0, 1).long()
    sets = torch.zeros(*places.shape[:2], keys + 1, dtype=torch.bool)
    return sets.scatter(-1, places.masked_fill(places < 0, keys), True)[..., :-1]


def held_slots(seq: int) -> dict[str, Tensor]:
    """Which tokens of a sequence this rank's ``index`` and ``route`` choices are of."""
    from megatron.core import parallel_state

    from megatron_xorl.layers.context import own_part

    mine = own_part({"slots": torch.arange(seq).unsqueeze(0)})["slots"][0]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    part = mine.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
    return {"index": mine, "route": part}


def run_rank(job: Job, states: dict[str, dict[str, Tensor]] | None) -> dict[str, Any]:
    """One rank of :func:`run_layout`."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.replicas import differing_replicas

    use_cpu()
    initialize(**job.layout)
    if job.before is not None:
        job.before()
    trainer = Trainer(job)
    choices: dict[tuple[int, int, str], Tensor] = {}
    for chunk in trainer.chunks:
        watch_choices(chunk, choices)
    told: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "start": trainer.factor_pieces(),
        "states": {},
        "gradients": {},
        "state_norms": {},
        "slots": held_slots(job.seq),
        "choices": {},
    }
    for step in range(1, job.steps + 1):
        if step in job.keep:
            told["states"][f"step {step}"] = trainer.factor_pieces()
        told["losses"].append(trainer.forward_backward(step))
        if step == 1:
            told["choices"] = dict(choices)
        updated, norm, _ = trainer.update(step)
        assert updated
        told["norms"].append(float(norm))
    told["end"] = trainer.factor_pieces()
    told["replicas"] = differing_replicas(trainer.chunks)
    for name in (*(f"step {step}" for step in job.keep), "random"):
        _gradients_at(trainer, told, name, states)
    told["random choices"] = dict(choices)
    told["cpu seconds"] = time.process_time()
    return told


def _gradients_at(
    trainer: Trainer, told: dict[str, Any], name: str, states: dict[str, dict[str, Tensor]] | None
) -> None:
    """Gradients at a given state; without one, at this run's own (a world of one holds every factor whole)."""
    if name == "random":
        trainer.gather()
        randomise(trainer.chunks)
    elif states is not None:
        trainer.set_factors(states[name])
    else:
        trainer.set_factors(assemble([told["states"][name]])[0])
    trainer.forward_backward(1 if name == "random" else int(name.split()[1]))
    told["gradients"][name] = trainer.gradient_pieces()
    told["state_norms"][name] = trainer.norm()


def run_layout(
    job: Job, states: dict[str, dict[str, Tensor]] | None = None, timeout: float = 240.0
) -> Outcome:
    """Run the job: free-running steps, then gradients at ``states`` (the one-process run's) and at random factors."""
    ranks = run_world(run_rank, job.world, job, states, timeout=timeout)

    def whole(pick: Any) -> dict[str, Tensor]:
        return assemble([pick(rank) for rank in ranks])[0]

    end, copies = assemble([rank["end"] for rank in ranks])
    return Outcome(
        losses=ranks[0]["losses"],
        norms=ranks[0]["norms"],
        start=whole(lambda rank: rank["start"]),
        end=end,
        states={name: whole(lambda rank, n=name: rank["states"][n]) for name in ranks[0]["states"]},
        gradients={
            name: whole(lambda rank, n=name: rank["gradients"][n]) for name in ranks[0]["gradients"]
        },
        state_norms=ranks[0]["state_norms"],
        choices=join_choices(ranks, "choices"),
        random_choices=join_choices(ranks, "random choices"),
        copies=copies,
        differing={name: says for rank in ranks for name, says in rank["replicas"].items()},
        cpu_seconds=sum(rank["cpu seconds"] for rank in ranks),
    )
