"""Read adapter directories: ``adapter_config.json`` beside one safetensors file, or shards and an index.

The one idea: whatever the format and whoever wrote it, a directory is read as logical factors in their full shapes. Headers are
read and checked first (``adapters.recovery``); values are read factor by factor, or the slice of one that a rank holds.

An expanded form holds a factor that experts share once an expert; reading one compares all copies and refuses the first that
differs, since the shared form could hold one of them alone.

Refused: pickled weights, files outside the directory, tensors that are no factors, half pairs, inf and NaN when they are read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_xorl.adapters.documents import FORMAT_VERSION
from megatron_xorl.adapters.formats import Entry, check_format, inventory_hash
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.adapters.peft_config import check_own_settings, foreign_adapter
from megatron_xorl.adapters.recovery import recover
from megatron_xorl.adapters.scopes import scope_regions
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, nearest
from megatron_xorl.weights.adapter_directory import located_tensors, read_document
from megatron_xorl.weights.adapter_layouts import split_columns, split_rows
from megatron_xorl.weights.adapter_writer import CONFIG_NAME

__all__ = ["AdapterFile"]


class AdapterFile:
    """An adapter directory on disk, in any of the formats, by whomever.

    Attributes:
        format: ``sglang_shared_outer``, ``hf_peft`` or ``hf_peft_fused``, told from the keys.
        factors: what it holds, in model order.
        adapter: the configuration that builds exactly these factors on the base.
        base_model, base_fingerprint: of the base; the fingerprint is None where the writer did not record one.
        own: whether this package wrote it.
        frozen: targets whose factors did not train and contribute all the same; they are in ``factors``, not trainable.

    Args:
        directory: of the adapter.

    Raises:
        AdapterError: files are missing or damaged, a tensor is no factor, or the configuration asks for more than LoRA.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.document = read_document(self.directory)
        base = self.document.get("base_model_name_or_path")
        self.own = "megatron_xorl" in self.document
        if not isinstance(base, str) and (self.own or base is not None):
            raise AdapterError(
                f"{self.directory / CONFIG_NAME}: base_model_name_or_path is {base!r}, expected the name of the base; "
                "export the adapter again"
            )
        self.base_model: str = base or ""
        self._files = located_tensors(self.directory)
        found = recover(self.tensors(), self.document, str(self.directory))
        self.format, self.factors = found.format, found.factors
        self._spelled = found.spelled
        self._holds: dict[str, list[Entry]] = {}
        for entry in found.entries:
            for name in entry.sources:
                self._holds.setdefault(name, []).append(entry)
        self.base_fingerprint: str | None = None
        self.frozen: frozenset[str] = frozenset()
        if self.own:
            self.adapter = self._own_section()
        else:
            self.adapter = foreign_adapter(
                self.document, self.factors, self.format, str(self.directory / CONFIG_NAME)
            )
        self._by_name = {factor.name: factor for factor in self.factors}

    @property
    def forward(self) -> dict[str, str] | None:
        """Mode and backend of the base's products while it trained; None where nobody recorded it."""
        own = self.document.get("megatron_xorl")
        told = own.get("forward") if isinstance(own, dict) else None
        return (
            {str(key): str(value) for key, value in told.items()}
            if isinstance(told, dict)
            else None
        )

    def keys(self) -> set[str]:
        """Keys of all tensors in the file or its shards, as they are spelled there."""
        return set(self._files)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``{key: (shape, dtype as safetensors spells it)}`` of every tensor, from the headers alone."""
        return {key: (shape, dtype) for key, (_, shape, dtype) in self._files.items()}

    def read(self, factor: Factor, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a factor, or the part of it given by one slice an axis.

        Raises:
            AdapterError: it is not in the file, has another shape, holds inf or NaN, or its copies differ.
        """
        own = self._by_name.get(factor.name)
        if own is None:
            raise AdapterError(
                f"{self.directory} holds no {factor.name}; it was trained with other targets or another scope"
            )
        if own.shape != factor.shape:
            raise AdapterError(
                f"{factor.name} is {list(own.shape)}, the model needs {list(factor.shape)}; it is of another base or rank"
            )
        if slices is None:
            slices = tuple(slice(0, size) for size in factor.shape)
        value = self._values(own, slices)
        finite = torch.isfinite(value)
        if not finite.all():
            raise AdapterError(
                f"{self._holds[own.name][0].key} has {int((~finite).sum())} inf or NaN values of {value.numel()}, "
                "expected finite ones; export an earlier checkpoint"
            )
        return value

    def check_factors(self, wanted: tuple[Factor, ...]) -> None:
        """Compare the file's factors with others, by name, both ways.

        Raises:
            AdapterError: lists what is missing and what is extra.
        """
        names, held = {factor.name for factor in wanted}, {factor.name for factor in self.factors}
        missing = [factor.name for factor in wanted if factor.name not in held]
        extra = [factor.name for factor in self.factors if factor.name not in names]
        if missing or extra:
            raise AdapterError(
                f"{self.directory} does not fit the model: {len(missing)} factors missing{_first(missing)}, "
                f"{len(extra)} extra{_first(extra)}; load it with the adapter config it was trained with"
            )

    def _values(self, factor: Factor, slices: tuple[slice, ...]) -> Tensor:
        entries = self._holds[factor.name]
        first = entries[0]
        if first.transform == "same":
            return self._part(first.key, slices)
        if first.transform == "expert":
            if factor.shared:
                return self._shared_copy(factor, entries, slices[1:]).unsqueeze(0)
            chosen = entries[slices[0]]
            return torch.stack([self._part(entry.key, slices[1:]) for entry in chosen])
        full = self._unfused(factor, first)
        if factor.shared:
            for expert in range(1, full.shape[0]):
                self._refuse_difference(factor, full[0], full[expert], first.key, expert)
            full = full[:1]
        return full[slices].contiguous()

    def _shared_copy(
        self, factor: Factor, entries: list[Entry], slices: tuple[slice, ...]
    ) -> Tensor:
        first = self._part(entries[0].key, slices)
        for entry in entries[1:]:
            other = self._part(entry.key, slices)
            self._refuse_difference(factor, first, other, entry.key, entry.expert or 0)
        return first

    def _refuse_difference(
        self, factor: Factor, first: Tensor, other: Tensor, key: str, expert: int
    ) -> None:
        if not torch.equal(_bits(first), _bits(other)):
            raise AdapterError(
                f"{self.directory}: {key} differs between expert 0 and expert {expert}, but {factor.name} is one factor for all "
                "experts here; an adapter trained with a factor an expert cannot be loaded"
            )

    def _unfused(self, factor: Factor, entry: Entry) -> Tensor:
        """``[E, …]`` of one factor of a bank as PEFT stores it."""
        value = self._part(entry.key, (slice(None), slice(None)))
        part, parts = entry.sources.index(factor.name), len(entry.sources)
        stacked = entry.shape[0] if factor.side == "A" else entry.shape[1]
        experts = stacked // (factor.rank * parts)
        if factor.side == "A":
            return split_rows(value, experts, part, parts)
        own, rest = split_columns(value, experts, part, parts)
        if rest.count_nonzero():
            raise AdapterError(
                f"{self.directory}: {entry.key} mixes the ranks of gate and up, which are independent factors here; "
                "an adapter that PEFT trained on gate_up_proj cannot be loaded"
            )
        return own

    def _part(self, key: str, slices: tuple[slice, ...]) -> Tensor:
        spelled = self._spelled[key]
        path = self.directory / self._files[spelled][0]
        with safe_open(str(path), framework="pt", device="cpu") as stream:
            value: Tensor = stream.get_slice(spelled)[slices]
        return value

    def _own_section(self) -> AdapterConfig:
        path, own = self.directory / CONFIG_NAME, self.document["megatron_xorl"]
        if not isinstance(own, dict) or not isinstance(own.get("format"), str):
            raise AdapterError(
                f"{path} has a megatron_xorl section without format; export the adapter again"
            )
        check_format(own["format"])
        if own.get("format_version", 1) != FORMAT_VERSION:
            raise AdapterError(
                f"{path} has format_version {own['format_version']!r}, this version reads {FORMAT_VERSION}; "
                "use the megatron_xorl that wrote it"
            )
        fingerprint = own.get("base_fingerprint")
        known = isinstance(fingerprint, str) or ("base_fingerprint" in own and fingerprint is None)
        if not isinstance(own.get("adapter"), dict) or not known:
            raise AdapterError(
                f"{path} lacks adapter or base_fingerprint in its megatron_xorl section; export the adapter again"
            )
        adapter = AdapterConfig.from_dict(own["adapter"], str(path))
        check_own_settings(self.document, adapter, self.factors, own["format"], str(path))
        banks = any(factor.region == "routed_experts" for factor in self.factors)
        if own["format"] != self.format:
            if banks:
                raise AdapterError(
                    f"{path} says format {own['format']}, the keys are those of {self.format}; export the adapter again"
                )
            self.format = own["format"]  # without a bank all formats have the same keys
        if "inventory_hash" in own and own["inventory_hash"] != inventory_hash(self.factors):
            raise AdapterError(
                f"{self.directory} does not hold the factors that its {CONFIG_NAME} was written for; export the adapter again"
            )
        self.base_fingerprint = fingerprint
        self._mark_frozen(path, own.get("frozen", []), adapter)
        return adapter

    def _mark_frozen(self, path: Path, listed: object, adapter: AdapterConfig) -> None:
        """Take the targets under ``frozen`` for what they are: outside the scope, and in the file with permission."""
        if not isinstance(listed, list):
            raise AdapterError(
                f"{path}: frozen is {listed!r}, expected a list; export the adapter again"
            )
        targets = {factor.target: factor.region for factor in self.factors}
        for name in listed:
            fault = None
            if name not in targets:
                close = nearest(str(name), targets, n=1)
                fault = f"is not in the file{f' (nearest: {close[0]})' if close else ''}"
            elif targets[name] in scope_regions(adapter.glm52_lora_scope):
                fault = f"the scope {adapter.glm52_lora_scope} trains"
            elif not adapter.allow_nonzero_frozen:
                fault = "may not contribute: allow_nonzero_frozen is false"
            if fault:
                raise AdapterError(
                    f"{path} lists {name!r} under frozen, which {fault}; export the adapter again"
                )
        self.frozen = frozenset(listed)
        self.factors = tuple(
            dataclasses.replace(factor, trainable=factor.target not in self.frozen)
            for factor in self.factors
        )


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def _first(names: list[str]) -> str:
    return f" (first {names[0]})" if names else ""
