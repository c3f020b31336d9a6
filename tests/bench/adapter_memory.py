"""Peak memory of a streaming export, at GLM-5.2's real bank size: 256 experts, hidden 6144, width 2048, rank 64, bf16.

The one idea: a process whose whole life is one export says its own peak, so nothing else is in it. ``files`` writes drawn factors
as they are handed over; ``live`` holds the factors as a model's pairs do and takes ``iter_adapter`` to its end, of whose peak the
factors themselves are the baseline. The base is not built: no export reads it.

    python -m tests.bench.adapter_memory            every format, two layers and four
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
ADAPTER: dict[str, Any] = {
    "rank": 64,
    "alpha": 64,
    "glm52_lora_scope": "routed_experts",
    "frozen_factors": "drop",
}


def peak() -> int:
    """Largest resident size of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def inventory(layers: int) -> Any:
    """The factors of the first so many expert layers of GLM-5.2."""
    from megatron_xorl.adapters.inventory import build_inventory
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.config.model import load_glm_config

    targets = [f"model.layers.{3 + layer}.mlp.experts.*" for layer in range(layers)]
    adapter = AdapterConfig(**ADAPTER, lora_target_modules=targets)
    return adapter, build_inventory(load_glm_config("glm-5.2"), adapter, dtype="bfloat16")


def files(format: str, layers: int) -> dict[str, int]:
    """Write an adapter directory and remove it; the peak above what was resident before."""
    import torch

    from megatron_xorl.adapters.formats import file_size
    from megatron_xorl.weights.adapter_writer import write_adapter

    adapter, listed = inventory(layers)

    def drawn() -> Iterator[tuple[str, torch.Tensor]]:
        for factor in listed.factors:
            yield factor.name, torch.ones(factor.shape, dtype=torch.bfloat16)

    before = peak()
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(
            Path(folder) / "a", listed.factors, drawn(), adapter, base_model="", base_fingerprint=None, format=format,
            forward={}, allow_expanded=True,
        )  # fmt: skip
    return _told(listed, before, file_size(listed.factors, format))


def live(format: str, layers: int) -> dict[str, int]:
    """Stream a live adapter to its end; the peak above the factors that the model holds anyway."""
    import torch
    from torch import nn

    from megatron_xorl.adapters.formats import file_size
    from megatron_xorl.layers.attach import _owned
    from megatron_xorl.layers.lora import LoraPair
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import iter_adapter

    use_cpu()
    initialize()
    adapter, listed = inventory(layers)
    model = nn.Module()
    model.config = type("Config", (), {"params_dtype": torch.bfloat16})
    model.inventory, model.adapter_config, model.pairs = listed, adapter, nn.ModuleList()
    for target in listed.targets:
        a, b = (_owned(listed.by_name[f"{target}.lora_{side}"]) for side in "AB")
        pair = LoraPair(a, b, scale=1.0, dtype=torch.bfloat16, device="meta", seed=1)
        for side in ("lora_A", "lora_B"):
            shape = getattr(pair, side).shape
            setattr(pair, side, nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)))
        model.pairs.append(pair)
    before = peak()
    sent = sum(tensor.nbytes for _, tensor in iter_adapter(model, format) if tensor is not None)
    assert sent == file_size(listed.factors, format)
    return _told(listed, before, sent)


def _told(listed: Any, before: int, size: int) -> dict[str, int]:
    bank = sum(factor.nbytes for factor in listed.factors) // (len(listed.factors) // 6)
    return {"bank": bank, "file": size, "above": peak() - before}


def measured(kind: str, format: str, layers: int) -> dict[str, int]:
    """Run one of the two in a process of its own."""
    words = [sys.executable, "-m", "tests.bench.adapter_memory", kind, format, str(layers)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """One measurement if it is named, otherwise the table."""
    if len(sys.argv) > 1:
        kind, format, layers = sys.argv[1:]
        print(json.dumps({"files": files, "live": live}[kind](format, int(layers))))
        return
    from megatron_xorl.adapters.formats import FORMATS

    print("kind   format               layers  file MiB  bank MiB  peak above MiB")
    for kind in ("files", "live"):
        for format in FORMATS:
            for layers in (2, 4):
                found = measured(kind, format, layers)
                print(
                    f"{kind:<6} {format:<20} {layers:>6} {found['file'] // MIB:>9} {found['bank'] // MIB:>9} "
                    f"{found['above'] // MIB:>15}"
                )


if __name__ == "__main__":
    main()
