"""A small, stock megatron.training job: what a script in the manner of pretrain_gpt.py does, on random tokens.

Like the core job it knows nothing of GLM-5.2; it shows what megatron.training itself needs from the CPU platform.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import torch

VOCAB, SEQ = 64, 16
ARGUMENTS = f"""
--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 32 --num-experts 4 --moe-router-topk 2
--moe-ffn-hidden-size 32 --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
--disable-bias-linear --seq-length {SEQ} --max-position-embeddings {SEQ} --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --transformer-impl local
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --distributed-backend gloo --tokenizer-type NullTokenizer
--vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 2 --num-workers 0
--optimizer adam --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --lr-decay-iters 3 --weight-decay 0.01
--use-distributed-optimizer --log-interval 1 --eval-interval 2 --eval-iters 1 --ckpt-format torch_dist --log-throughput
""".split()


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``count`` samples of random tokens, the same on every rank."""

    def __init__(self, count: int) -> None:
        """Hold ``count`` samples."""
        self.count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index``: tokens [s] int64."""
        generator = torch.Generator().manual_seed(index)
        return {"tokens": torch.randint(0, VOCAB - 4, (SEQ,), generator=generator)}


def pretrain_steps(
    skip: frozenset[str], iterations: int, folder: str, *extra: str, resume: bool = False
) -> int:
    """Run megatron.training.pretrain up to ``iterations`` and save to ``folder``; return the iteration reached."""
    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu(skip=skip)
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    saving = ["--save", folder, "--save-interval", "2", *(["--load", folder] if resume else [])]
    sys.argv = ["pretrain", *ARGUMENTS, "--train-iters", str(iterations), *saving, *extra]
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, _datasets, ModelType.encoder_or_decoder, _forward)
    return get_args().curr_iteration


def losses(log: str) -> list[float]:
    """Return the losses that megatron.training printed."""
    return [float(value) for value in re.findall(r"lm loss: ([-+.\dE]+)", log)]


def _datasets(counts: list[int], vp_stage: int | None = None) -> tuple[RandomTokens, ...]:
    return tuple(RandomTokens(max(count, 1)) for count in counts)


_datasets.is_distributed = True  # build the data on every tensor-parallel rank


def _forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(iterator)["tokens"].cuda(non_blocking=True)
    positions = torch.arange(SEQ).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), partial(_loss)


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = output.float().sum()
    count = torch.tensor(output.numel(), dtype=torch.int)
    return total, count, {"lm loss": torch.stack((total.detach(), count.float()))}
