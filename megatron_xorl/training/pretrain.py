"""Fine-tune GLM-5.2 adapters with Megatron's own training loop.

    torchrun --nproc-per-node 2 -m megatron_xorl.pretrain --hf-model glm-tiny --adapter-config adapter.yaml \
        --chat-data train.jsonl --seq-length 128 --train-iters 80 --lr 3e-3 --expert-model-parallel-size 2

Takes ``pretrain_gpt.py``-style arguments plus ours. The arguments that describe the model come from
the base's ``config.json``, those that adapters need come from the table in ``training.arguments``;
both can be written out, in agreement, and a contradiction is refused. Without a GPU the same code
runs on CPU and gloo.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.fp8.engine import BACKENDS, MODES
from megatron_xorl.parallel.cpu import repair_megatron, use_cpu
from megatron_xorl.training.chat import ChatTokenizer
from megatron_xorl.training.checkpoint_forms import FORMS
from megatron_xorl.training.data import ChatDataset, TrainingSamples, check_batches

__all__ = ["add_arguments", "forward_step", "loss_function", "main", "pretrain"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
SPEC = ("megatron_xorl.specs", "glm52_layer_spec")


@record
def main(argv: list[str] | None = None) -> None:
    """Entry point of ``python -m megatron_xorl.pretrain``; a failing rank prints its traceback and its number."""
    faulthandler.enable()
    die_with_launcher()
    pretrain(sys.argv[1:] if argv is None else argv)


def die_with_launcher() -> None:
    """Under torchrun on Linux: end this rank when its agent is killed, so that no orphan goes on writing checkpoints."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pretrain(argv: list[str]) -> None:
    """Run one training job from command-line arguments in this process, a rank of torchrun or the only one.

    Raises:
        MegatronXorlError: the base, the adapters, the data or the arguments cannot be used; nothing was trained.
    """
    if torch.cuda.is_available():
        repair_megatron()
    else:
        use_cpu()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as megatron_pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_xorl.training.metrics import MetricsLog
    from megatron_xorl.training.seams import Seams, install_seams

    sys.argv = [sys.argv[0], *compose(argv)]
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    log = MetricsLog(args)
    install_seams(Seams(on_iteration=log.on_iteration))
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    provider = functools.partial(_train_valid_test_datasets, args)
    provider.is_distributed = True
    megatron_pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)


def compose(argv: list[str]) -> list[str]:
    """Put the model's and the forced arguments before the user's, so that the user's win and are then checked.

    Raises:
        SystemExit: ``--hf-model``, ``--adapter-config`` or ``--chat-data`` is missing (argparse's message, exit 2).
    """
    from megatron_xorl.training.arguments import (
        forced_arguments,
        model_arguments,
        without_virtual_stages,
    )

    own, _ = add_arguments(
        argparse.ArgumentParser(prog="megatron_xorl.pretrain", add_help=False)
    ).parse_known_args(argv)
    platform = [
        "--num-workers",
        "0",
        "--no-create-attention-mask-in-dataloader",
        "--eval-iters",
        "0",
        "--eval-interval",
        "1000",
        "--split",
        "100,0,0",
    ]
    if not torch.cuda.is_available():
        platform += ["--distributed-backend", "gloo", "--use-cpu-initialization"]
    return [
        *model_arguments(load_glm_config(own.hf_model), argv),
        *forced_arguments(),
        *platform,
        "--spec",
        *SPEC,
        *with_form(without_virtual_stages(argv)),
    ]


def with_form(argv: list[str]) -> list[str]:
    """``--ckpt-format dcp`` under the name that Megatron's parser, which has its own formats, leaves to us."""
    words = [word.replace("--ckpt-format=dcp", "--ckpt-form=dcp") for word in argv]
    for place, (word, value) in enumerate(itertools.pairwise(words)):
        if (word, value) == ("--ckpt-format", "dcp"):
            words[place] = "--ckpt-form"
    return words


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our arguments to Megatron's parser."""
    group = parser.add_argument_group("megatron_xorl")
    group.add_argument("--hf-model", required=True, help="Hugging Face directory of the base")
    group.add_argument("--adapter-config", required=True, help="adapter YAML file")
    group.add_argument(
        "--chat-data", required=True, help="chat JSONL file, one {'messages': [...]} a line"
    )
    group.add_argument(
        "--chat-truncate", action="store_true", help="cut samples longer than --seq-length"
    )
    group.add_argument(
        "--chat-repeat",
        action="store_true",
        help="repeat data smaller than one global batch, in order",
    )
    group.add_argument("--metrics", default=None, help="metrics.jsonl to append to")
    group.add_argument(
        "--check-replicas",
        type=int,
        default=0,
        metavar="N",
        help="every N steps, compare all copies of every factor and stop if they differ (0: never)",
    )
    add_engine_arguments(group)
    group.add_argument(
        "--keep-last", type=int, default=None, help="keep this many newest checkpoints"
    )
    group.add_argument(
        "--keep-every", type=int, default=None, metavar="N", help="with --keep-last: keep iterations that are multiples of N too"
    )  # fmt: skip
    group.add_argument(
        "--ckpt-form", choices=FORMS, default=FORMS[0],
        help="files of a checkpoint; dcp (or --ckpt-format dcp) can be read by torch's distributed checkpoint alone",
    )  # fmt: skip
    return parser


def add_engine_arguments(group: Any) -> None:
    """Add how FP8 products are computed, which a launch script of another's may offer too."""
    group.add_argument(
        "--fp8-backend", choices=BACKENDS, default=None, help="what computes products with the FP8 base"
    )  # fmt: skip
    group.add_argument(
        "--fp8-mode", choices=("auto", *MODES), default=None, help="w8a8 quantises the activations of the forward"
    )  # fmt: skip
    group.add_argument(
        "--override-lr",
        action="store_true",
        help="resume with this run's --lr and --min-lr; the rest of the schedule must be the checkpoint's",
    )
    group.add_argument(
        "--allow-forward-change",
        action="store_true",
        help="resume a checkpoint that was trained with another FP8 mode or backend",
    )


def _train_valid_test_datasets(
    args: argparse.Namespace, *_: Any, vp_stage: int | None = None, **__: Any
) -> tuple[TrainingSamples, None, None]:
    """Samples of one virtual stage; every stage reads the same."""
    del vp_stage
    check_batches(
        micro=args.micro_batch_size,
        global_batch=args.global_batch_size,
        data_parallel=args.data_parallel_size,
    )
    tokenizer = ChatTokenizer(Path(args.hf_model))
    dataset = ChatDataset(
        args.chat_data, tokenizer, seq_length=args.seq_length, truncate=args.chat_truncate
    )
    samples = TrainingSamples(
        dataset,
        steps=args.train_iters,
        global_batch=args.global_batch_size,
        repeat=args.chat_repeat,
    )
    return samples, None, None


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    """Megatron's forward step: per-token losses of one microbatch and the function that reduces them.

    Losses are ``[b, s]``; with context parallelism s are the tokens that this rank holds of each sequence.
    """
    from megatron_xorl.layers.context import own_part

    batch = {
        key: value.to(torch.cuda.current_device())
        for key, value in own_part(next(data_iterator)).items()
    }
    keys = _dropout_keys(model, batch)
    losses = model(batch["tokens"], batch["position_ids"], keys, labels=batch["labels"])
    return losses, functools.partial(loss_function, batch["loss_mask"])


def _dropout_keys(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
    """Keys of the batch's tokens, where the adapters have a dropout."""
    from megatron.core.utils import unwrap_model
    from megatron.training.global_vars import get_args

    from megatron_xorl.layers.token_keys import dropout_keys

    adapter = getattr(unwrap_model(model), "adapter_config", None)
    if adapter is None or not adapter.dropout:
        return None
    return dropout_keys(batch["sample"], batch["position_ids"], seed=get_args().seed)


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the trained tokens' losses and their number: Megatron divides by the number over the global batch.

    A microbatch without a label contributes nothing to either.
    """
    loss = (losses.float() * loss_mask).sum()
    count = loss_mask.sum().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}
