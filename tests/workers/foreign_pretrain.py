"""A pretraining script in the manner of Megatron's pretrain_gpt.py: it knows Megatron, and of us only ``--spec``.

    MEGATRON_XORL_MODEL=glm-tiny MEGATRON_XORL_ADAPTER_CONFIG=adapter.yaml torchrun --nproc-per-node 2 foreign_pretrain.py \
        --spec megatron_xorl.specs glm52_layer_spec --multi-latent-attention ... --save checkpoints --load checkpoints

The base and the adapters come from the environment. The model's arguments are written out by hand, as a launch script has them.
Where there is no GPU, ``use_cpu()`` comes first; with one that line is left out.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

SEQ = 48

TINY_GLM = f"""
--spec megatron_xorl.specs glm52_layer_spec
--num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 --kv-channels 64
--multi-latent-attention --q-lora-rank 128 --kv-lora-rank 128 --qk-head-dim 48 --qk-pos-emb-head-dim 16 --v-head-dim 64
--rope-type rope --rotary-base 8000000 --rotary-scaling-factor 1.0 --position-embedding-type rope --no-rope-fusion
--qk-layernorm --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --swiglu
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
--moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid --moe-router-dtype fp32
--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --moe-router-bias-update-rate 0
--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion
--tokenizer-type NullTokenizer --vocab-size 320 --make-vocab-size-divisible-by 1
--seq-length {SEQ} --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 2
--optimizer adam --use-distributed-optimizer --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-decay-iters 20
--weight-decay 0.01 --clip-grad 1.0 --adam-beta2 0.95 --calculate-per-token-loss
--log-interval 1 --eval-interval 1000 --eval-iters 0 --num-workers 0 --no-create-attention-mask-in-dataloader
--ckpt-format torch_dist --distributed-backend gloo --use-cpu-initialization
""".split()


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens of a fixed random sequence per sample; a sample trains another number of them, the fourth none."""

    def __init__(self, count: int) -> None:
        """Hold ``count`` samples."""
        self.count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``text`` int64 ``[SEQ + 1]`` and ``loss_mask`` fp32 ``[SEQ]``."""
        generator = torch.Generator().manual_seed(index % 4)
        mask = (torch.arange(SEQ) % 8 < (2, 5, 3, 0)[index % 4]).float()
        return {"text": torch.randint(0, 256, (SEQ + 1,), generator=generator), "loss_mask": mask}


def get_batch(iterator: Any) -> tuple[torch.Tensor, ...]:
    """Return tokens, labels, loss mask and positions of one microbatch, what this context rank holds, each ``[b, s]``."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = {key: value.cuda(non_blocking=True) for key, value in next(iterator).items()}
    tokens, labels = batch["text"][:, :-1].contiguous(), batch["text"][:, 1:].contiguous()
    whole = {"tokens": tokens, "labels": labels, "loss_mask": batch["loss_mask"]}
    whole["position_ids"] = torch.arange(SEQ).expand_as(tokens)
    cut = get_batch_on_this_cp_rank(
        whole, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    return tuple(cut.values())


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of the microbatch, the number of tokens in it, and both for the log."""
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    count = loss_mask.sum().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run the model on one microbatch."""
    tokens, labels, loss_mask, positions = get_batch(iterator)
    return model(tokens, positions, None, labels=labels), partial(loss_func, loss_mask)


def datasets_provider(counts: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the training samples; there is nothing to validate or test on."""
    return Samples(counts[0]), None, None


def main() -> None:
    """Train as ``sys.argv`` says."""
    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    datasets_provider.is_distributed = True
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


def run(argv: list[str]) -> None:
    """Train with the tiny GLM's arguments and ``argv``: the script as a function, for a rank of a test's world."""
    sys.argv = ["foreign_pretrain.py", *TINY_GLM, *argv]
    main()


if __name__ == "__main__":
    main()
