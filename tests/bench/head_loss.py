"""Head and cross-entropy in chunks against whole logits: peak memory and time, side by side in one run.

    python -m tests.bench.head_loss
    python -m tests.bench.head_loss --vocabulary 4096 --tokens 256 --hidden 64 --repeat 1

The losses of all tokens and the gradients of the hidden states and of both factors; the whole form is the head's logits and
Megatron's own cross-entropy. Every measurement is a process of its own, so that its peak memory is its own: the highest resident
size less what was there before the first call. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

OPTIONS = ("vocabulary", "tokens", "hidden", "rank", "repeat", "threads", "dtype")


def main() -> None:
    """Measure, or, with ``--one``, be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=154_880)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512, help="GLM-5.2 has 6144")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 64, 256], help="MiB")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=1, help="more contend with whatever else runs"
    )
    parser.add_argument("--one", type=int, metavar="CHUNK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(_measure(args, args.one)))
        return
    _print(args, {chunk: _in_a_process(args, chunk) for chunk in (0, *args.chunks)})


def _in_a_process(args: argparse.Namespace, chunk: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.head_loss", "--one", str(chunk)]
    for name in OPTIONS:
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(args: argparse.Namespace, chunk: int) -> dict[str, Any]:
    """Median seconds, peak bytes, and (for comparing the forms) a few numbers of each result; chunk 0 is the whole form."""
    import torch

    from megatron_xorl.layers.loss import token_losses
    from tests.training.harness import use_one_process

    use_one_process()
    torch.set_num_threads(args.threads)
    head, x, labels, grad = _inputs(args)
    (pair,) = head.adapters.values()
    before, times = _peak(), []
    for _ in range(args.repeat):
        x.grad = pair.lora_A.grad = pair.lora_B.grad = None
        start = time.perf_counter()
        losses = (
            token_losses(x, labels, head.base, pair, head.tp_group, chunk * 2**20)
            if chunk
            else _whole(head, x, labels)
        )
        losses.backward(grad)
        times.append(time.perf_counter() - start)
    results = {"losses": losses, "x": x.grad, "A": pair.lora_A.grad, "B": pair.lora_B.grad}
    probe = {
        name: value.detach().float().flatten()[:: max(1, value.numel() // 100)].tolist()
        for name, value in results.items()
    }
    return {"seconds": statistics.median(times), "bytes": _peak() - before, "probe": probe}


def _whole(head: Any, x: Any, labels: Any) -> Any:
    from megatron.core import tensor_parallel

    logits, _ = head(x.unsqueeze(1))
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.unsqueeze(1))
    return losses.squeeze(1)


def _inputs(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    import torch

    from megatron_xorl.adapters.inventory import Factor
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.layers.head import Head
    from megatron_xorl.layers.lora import FactorSlice, LoraPair
    from megatron_xorl.specs import transformer_config

    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    config = transformer_config(load_glm_config("tiny"), dtype=dtype)
    head = Head(args.hidden, args.vocabulary, config=config, block=None)
    head.base.dense.normal_(std=args.hidden**-0.5)
    pieces = []
    for side, shape in (("A", (args.rank, args.hidden)), ("B", (args.vocabulary, args.rank))):
        factor = Factor(
            name=f"lm_head.lora_{side}", target="lm_head", region="lm_head", side=side, shape=shape, dtype=args.dtype,
            trainable=True, shared=False, tp_axis=None, ep_axis=None, rank=args.rank,
        )  # fmt: skip
        pieces.append(FactorSlice(factor, tp=(0, 1), ep=(0, 1)))
    pair = LoraPair(*pieces, scale=2.0, dtype=dtype, device="cpu", seed=0)
    torch.nn.init.normal_(pair.lora_B, std=0.1)
    head.set_slots(("lm_head",))
    head.attach("lm_head", pair)
    x = torch.randn(args.tokens, args.hidden, dtype=dtype).requires_grad_()
    labels = torch.randint(0, args.vocabulary, (args.tokens,))
    return head, x, labels, torch.randn(args.tokens)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _print(args: argparse.Namespace, found: dict[int, dict[str, Any]]) -> None:
    logits = args.tokens * args.vocabulary * 4 / 2**20
    print(
        f"{args.vocabulary} x {args.tokens} tokens, hidden {args.hidden}, rank {args.rank}, {args.dtype}, forward and backward, "
        f"{args.threads} thread, median of {args.repeat}; fp32 logits of all tokens are {logits:.0f} MiB"
    )
    print(f"{'form':>12} {'peak MiB':>9} {'seconds':>8} {'time ratio':>11} {'difference':>11}")
    whole = found[0]
    for chunk, one in found.items():
        apart = max(
            math.dist(one["probe"][name], whole["probe"][name]) / math.hypot(*whole["probe"][name])
            for name in whole["probe"]
        )
        form, ratio = f"{chunk} MiB" if chunk else "whole", one["seconds"] / whole["seconds"]
        print(
            f"{form:>12} {one['bytes'] / 2**20:>9.0f} {one['seconds']:>8.2f} {ratio:>11.2f} {apart:>11.1e}"
        )


if __name__ == "__main__":
    main()
