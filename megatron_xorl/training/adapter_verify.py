"""Does an adapter file compute what its numbers say? Judged region by region against a merge by hand.

For each region the model gets that region's factors and no others (B zero elsewhere), and its logits are compared with those of
the same model without adapters whose weights of the region are W + scale * B @ A in fp32, W dequantised here by repeating block
scales. A region whose factors change no logit is a failure: it trained nothing, or nothing of it is applied.

A file in ``hf_peft`` or ``hf_peft_fused`` form is also loaded by transformers and PEFT themselves, where both are installed, and
all of it compared (``training.peft_reference``).

The base is loaded twice, so the time is that of loading it; the merged model is dense, in fp32, one region at a time.

CPU command: ``megatron-xorl adapter verify DIR --base HF_DIR``
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_xorl.adapters.formats import is_bank
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.adapters.scopes import REGIONS
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.layers.attach import named_factors
from megatron_xorl.layers.base import load_base
from megatron_xorl.training.adapter_io import load_adapter
from megatron_xorl.training.model import forward_logits, load_model
from megatron_xorl.training.peft_reference import dequantised, peft_logits
from megatron_xorl.weights.adapter_base import check_fits
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.names import SCALE_SUFFIX, hf_tensors
from megatron_xorl.weights.opening import Checkpoint, open_checkpoint

__all__ = ["TOLERANCE", "verify_adapter"]

TOLERANCE = 1e-5
"""Largest difference of a logit, fp32: both sides round alike but for the order of three products."""

TOKENS = 40


def verify_adapter(directory: str | Path, base: str | Path, *, seed: int = 0) -> dict[str, Any]:
    """Compare an adapter with a merge by hand, in this process, in fp32.

    Args:
        directory: of the adapter, any format.
        base: Hugging Face directory it was trained on.
        seed: of the token ids that are run.

    Returns:
        ``{"passed", "format", "tolerance", "regions": {name: {"max_abs", "change", "passed", "reason"}}}``, and ``"peft":
        {"max_abs", "passed", "reason"}`` for the PEFT formats where transformers and PEFT are installed. ``change`` is the
        largest difference from the bare base; ``reason`` is None where a region passed.

    Raises:
        AdapterError, WeightsError, ConfigError: what is wrong with either directory.
    """
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    file = AdapterFile(directory)
    model, plain = load_model(base), load_model(base)
    glm: GlmConfig = model.glm_config
    check_fits(file, glm)
    load_adapter(model, directory)
    model.eval(), plain.eval()  # no dropout
    ids = torch.randint(
        0, glm.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(seed)
    )
    checkpoint = open_checkpoint(base)
    with torch.no_grad():
        everything, bare = forward_logits(model, ids), forward_logits(plain, ids)
        held = [name for name in REGIONS if any(factor.region == name for factor in file.factors)]
        regions = {
            name: _judge(*_both(model, plain, file, checkpoint, glm, name, ids), bare)
            for name in held
        }
    report: dict[str, Any] = {
        "passed": all(found["passed"] for found in regions.values()),
        "format": file.format,
        "tolerance": TOLERANCE,
        "regions": regions,
    }
    if file.format != "sglang_shared_outer":
        reference = peft_logits(Path(directory), Path(base), checkpoint, glm, ids)
        if reference is not None:
            report["peft"] = _judge(everything, reference, bare)
            report["passed"] = report["passed"] and report["peft"]["passed"]
    return report


def _judge(found: Tensor, expected: Tensor, bare: Tensor) -> dict[str, Any]:
    difference = float((found - expected).abs().max())
    change = float((expected - bare).abs().max())
    reason = None
    if not difference <= TOLERANCE:  # NaN fails too
        reason = f"differs from the merge by {difference:.2e}, expected at most {TOLERANCE:g}"
    elif not change > TOLERANCE:
        reason = f"changes no logit by more than {change:.2e}: its factors do nothing"
    return {"max_abs": difference, "change": change, "passed": reason is None, "reason": reason}


def _both(
    model: nn.Module,
    plain: nn.Module,
    file: AdapterFile,
    checkpoint: Checkpoint,
    glm: GlmConfig,
    region: str,
    ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits with one region's factors, and with its weights merged."""
    stored = {factor.name for factor in file.factors}
    for factor, piece, parameter in named_factors(model).values():
        if factor.side == "B":
            on = factor.region == region and factor.name in stored
            value = file.read(factor) if on else torch.zeros(factor.shape)
            parameter.copy_(piece.of(value))
    load_base(plain, _Merged(checkpoint, glm, file, region), glm)  # type: ignore[arg-type]
    return forward_logits(model, ids), forward_logits(plain, ids)


class _Merged:
    """A checkpoint, read by name, whose weights of one region are dense, fp32, and hold the adapter."""

    def __init__(
        self, checkpoint: Checkpoint, glm: GlmConfig, file: AdapterFile, region: str
    ) -> None:
        self._checkpoint, self._glm, self._file = checkpoint, glm, file
        self._rows = {row.hf: row for row in hf_tensors(glm) if row.region == region}
        self._pairs: dict[str, list[Factor]] = {}
        for factor in file.factors:
            self._pairs.setdefault(factor.target, []).append(factor)
        self._bank: tuple[str, Tensor | None] = ("", None)

    def __contains__(self, name: str) -> bool:
        if name.removesuffix(SCALE_SUFFIX) in self._rows:
            return not name.endswith(SCALE_SUFFIX)
        return name in self._checkpoint

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or a part of it; those of the region with the adapter in them."""
        if name not in self._rows:
            return self._checkpoint.read(name, slices)
        value = dequantised(self._checkpoint, name, self._glm)
        delta = self._delta(name)
        value = value if delta is None else value + delta
        return value if slices is None else value[slices]

    def _delta(self, name: str) -> Tensor | None:
        target, expert = name.removesuffix(".weight"), self._rows[name].expert
        if expert is not None:
            target = target.replace(f".experts.{expert}.", ".experts.")
        if target not in self._pairs:
            return None
        if self._bank[0] != target:  # the experts of a bank follow each other
            a, b = (self._file.read(factor).float() for factor in self._pairs[target])
            scale = self._file.adapter.scale_of(self._pairs[target][0].rank)
            self._bank = (target, scale * (b @ a))  # a leading axis of 1 is for all experts
        delta = self._bank[1]
        assert delta is not None
        if is_bank(target):
            assert expert is not None
            return delta[expert]
        return delta
