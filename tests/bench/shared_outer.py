"""One mixture-of-experts layer with shared factors once per token against the plain form: bytes kept, peak memory, time.

    python -m tests.bench.shared_outer
    python -m tests.bench.shared_outer --hidden 128 --width 64 --experts 8 --tokens 32 --repeat 1

By default a quarter of GLM-5.2's widths and its 8 experts a token. Every form is a process of its own, so that its peak memory is
its own: the highest resident size less what was there before the first call. Kept: every storage that forward leaves to backward,
weights aside. Times are medians, of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

OPTIONS = ("hidden", "width", "experts", "topk", "tokens", "rank", "repeat", "threads", "dtype")


def main() -> None:
    """Measure, or, with ``--one``, be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1536, help="GLM-5.2 has 6144")
    parser.add_argument("--width", type=int, default=512, help="GLM-5.2 has 2048")
    parser.add_argument("--experts", type=int, default=32, help="GLM-5.2 has 256")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="more contend with whatever else runs"
    )
    parser.add_argument("--one", choices=["once", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_measure(args)))
        return
    print(
        f"hidden {args.hidden}, expert width {args.width}, {args.topk} of {args.experts} experts, {args.tokens} tokens, "
        f"rank {args.rank}, {args.dtype}, {args.threads} thread, median of {args.repeat}"
    )
    print(f"{'form':>6} {'kept MiB':>9} {'peak MiB':>9} {'seconds':>8}")
    for form in ("plain", "once"):
        one = _in_a_process(args, form)
        print(
            f"{form:>6} {one['kept'] / 2**20:>9.1f} {one['peak'] / 2**20:>9.0f} {one['seconds']:>8.2f}"
        )


def _in_a_process(args: argparse.Namespace, form: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.shared_outer", "--one", form]
    for name in OPTIONS:
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from tests.training.harness import use_one_process

    use_one_process()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layer = _layer(args)
    layer.experts.once_per_token = args.one == "once"
    weights = {value.untyped_storage().data_ptr() for value in layer.state_dict().values()}
    x = torch.randn(args.tokens, 1, args.hidden, dtype=getattr(torch, args.dtype)).requires_grad_()
    grad = torch.randn_like(x)
    before, times, kept = _peak(), [], {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(args.repeat):
        kept.clear()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, _ = layer(x)
        y.backward(grad)
        times.append(time.perf_counter() - start)
    return {
        "kept": sum(kept.values()),
        "peak": _peak() - before,
        "seconds": statistics.median(times),
    }


def _layer(args: argparse.Namespace) -> Any:
    """The layer as the specs build it, FP8 codes and factors drawn at random."""
    import dataclasses

    import torch
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.layers.provider import FrozenSpecProvider
    from megatron_xorl.specs import _mlp_spec, transformer_config

    glm = dataclasses.replace(
        load_glm_config("tiny"), hidden_size=args.hidden, moe_intermediate_size=args.width, n_routed_experts=args.experts,
        num_experts_per_tok=args.topk,
    )  # fmt: skip
    config = transformer_config(glm, dtype=getattr(torch, args.dtype))
    build = _mlp_spec(FrozenSpecProvider(glm), dense=False)
    layer = build(config=config, layer_number=2, pg_collection=get_default_pg_collection())
    layer.router.weight.data.normal_(std=args.hidden**-0.5)
    for bank in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        base = bank.base
        base.codes.copy_(torch.randn(base.shape).to(torch.float8_e4m3fn).view(torch.uint8))
        base.scales.fill_(base.shape[-1] ** -0.5)
    for shared in (layer.shared_experts.linear_fc1, layer.shared_experts.linear_fc2):
        shared.base.codes.zero_()
    for leaf, bank, sharing in (
        ("gate_proj", layer.experts.linear_fc1, "A"),
        ("up_proj", layer.experts.linear_fc1, "A"),
        ("down_proj", layer.experts.linear_fc2, "B"),
    ):
        _attach(args, bank, leaf, sharing)
    return layer.requires_grad_(True)


def _attach(args: argparse.Namespace, bank: Any, leaf: str, sharing: str) -> None:
    import torch

    from megatron_xorl.adapters.inventory import Factor
    from megatron_xorl.layers.lora import FactorSlice, LoraPair

    leaves = ("gate_proj", "up_proj") if sharing == "A" else ("down_proj",)
    bank.set_slots(leaves)
    sizes = {
        "A": (args.rank, bank.base.shape[2]),
        "B": (bank.base.shape[1] // len(leaves), args.rank),
    }
    pieces = []
    for side, shape in sizes.items():
        shared = side == sharing
        factor = Factor(
            name=f"{leaf}.lora_{side}", target=leaf, region="routed_experts", side=side,
            shape=(1 if shared else args.experts, *shape), dtype=args.dtype, trainable=True, shared=shared,
            tp_axis=None, ep_axis=None if shared else 0, rank=args.rank,
        )  # fmt: skip
        pieces.append(FactorSlice(factor, tp=(0, 1), ep=(0, 1)))
    dtype = getattr(torch, args.dtype)
    pair = LoraPair(*pieces, scale=2.0, dtype=dtype, device="cpu", seed=0)
    torch.nn.init.normal_(pair.lora_B, std=0.1)
    bank.attach(leaf, pair)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
