"""The run configuration: everything ``megatron-xorl train RUN.yaml`` needs, read strictly.

The one idea: one frozen object, resolved before anything starts, that can be written beside the run
as what was used. Relative paths are relative to the folder of the YAML file, those given with
``--set`` too. Refused: unknown keys, with the nearest known one; a global batch that is not a
multiple of the micro batch; a warm-up longer than the run.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.strict import (
    Flag,
    Number,
    StrictModel,
    Text,
    Whole,
    one_of,
    raise_config_error,
    show,
)
from megatron_xorl.config.yaml import load_yaml, parse_yaml
from megatron_xorl.errors import ConfigError

__all__ = ["RunConfig", "load_run_config"]


def _at_least(model: StrictModel, least: float, *names: str) -> None:
    for name in names:
        value = getattr(model, name)
        if value is not None and value < least:
            raise ValueError(f"{name.rstrip('_')} is {value:g}, expected at least {least:g}")


def _betas(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"found {show(value)}, expected two numbers such as [0.9, 0.95]")
    return tuple(value)


class ModelSection(StrictModel):
    """``model``: the checkpoint directory, the compute dtype, and how products with FP8 weights are computed.

    ``auto`` leaves the choice to ``MEGATRON_XORL_FP8_BACKEND`` and ``MEGATRON_XORL_FP8_MODE``, then to what is fastest here and
    that backend's own mode.
    """

    path: Text
    dtype: Annotated[
        Literal["bf16", "fp32"], one_of(("bf16", "fp32"), {"bfloat16": "bf16", "float32": "fp32"})
    ] = "bf16"
    fp8_backend: Annotated[
        Literal["auto", "reference", "cpu", "triton"],
        one_of(("auto", "reference", "cpu", "triton")),
    ] = "auto"
    fp8_mode: Annotated[Literal["auto", "w8a16", "w8a8"], one_of(("auto", "w8a16", "w8a8"))] = (
        "auto"
    )


class DataSection(StrictModel):
    """``data``: chat JSONL and how it becomes samples. ``truncate`` and ``repeat`` are off unless asked for."""

    train: Text
    seq_length: Whole
    template: Annotated[Literal["glm"], one_of(("glm",))] = "glm"
    truncate: Flag = False
    repeat: Flag = False

    @model_validator(mode="after")
    def _positive(self) -> Self:
        _at_least(self, 1, "seq_length")
        return self


class ParallelSection(StrictModel):
    """``parallel``: Megatron's group sizes, and ``vpp`` virtual stages on each pipeline rank.

    Every ``check_replicas`` steps the copies of all factors are compared (0: never).
    """

    tp: Whole = 1
    pp: Whole = 1
    ep: Whole = 1
    etp: Whole = 1
    cp: Whole = 1
    vpp: Whole = 1
    check_replicas: Whole = 0

    @model_validator(mode="after")
    def _positive(self) -> Self:
        _at_least(self, 1, "tp", "pp", "ep", "etp", "cp", "vpp")
        _at_least(self, 0, "check_replicas")
        return self


class OptimizerSection(StrictModel):
    """``optimizer``: AdamW. ``clip`` is the largest gradient norm, 0 for none."""

    lr: Number
    weight_decay: Number = 0.01
    betas: Annotated[tuple[Number, Number], BeforeValidator(_betas)] = (0.9, 0.95)
    clip: Number = 1.0

    @model_validator(mode="after")
    def _sane(self) -> Self:
        _at_least(self, 0, "lr", "weight_decay", "clip")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas are {list(self.betas)}, expected two numbers from 0 to less than 1"
            )
        return self


class ScheduleSection(StrictModel):
    """``schedule``: steps of training, linear warm-up, then ``decay`` down to ``final`` × the learning rate."""

    steps: Whole
    warmup: Whole = 0
    decay: Annotated[
        Literal["cosine", "linear", "constant"], one_of(("cosine", "linear", "constant"))
    ] = "cosine"
    final: Number = 0.0

    @model_validator(mode="after")
    def _sane(self) -> Self:
        _at_least(self, 1, "steps")
        _at_least(self, 0, "warmup", "final")
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup is {self.warmup}, longer than the {self.steps} steps of the run"
            )
        if self.final > 1:
            raise ValueError(
                f"final is {self.final:g}, expected a fraction of the learning rate from 0 to 1"
            )
        return self


class BatchSection(StrictModel):
    """``batch``: samples of one microbatch on one process, and of one optimizer step on all of them."""

    micro: Whole = 1
    global_: Whole = Field(alias="global")

    @model_validator(mode="after")
    def _divides(self) -> Self:
        _at_least(self, 1, "micro", "global_")
        if self.global_ % self.micro:
            raise ValueError(
                f"global is {self.global_}, expected a multiple of micro ({self.micro})"
            )
        return self


class CheckpointSection(StrictModel):
    """``checkpoint``: where (None: under ``output``), every how many steps (0: at the end only), what stays, in which form.

    ``keep_last`` newest stay (None: all), and of the others the multiples of ``keep_every``. ``format: dcp`` writes files that
    torch's distributed checkpoint reads without Megatron; either is resumed from.
    """

    dir: Text | None = None
    interval: Whole = 0
    keep_last: Whole | None = None
    keep_every: Whole | None = None
    format: Annotated[Literal["torch_dist", "dcp"], one_of(("torch_dist", "dcp"))] = "torch_dist"

    @model_validator(mode="after")
    def _sane(self) -> Self:
        _at_least(self, 0, "interval")
        _at_least(self, 1, "keep_last", "keep_every")
        return self


class RunConfig(StrictModel):
    """A run; every field is a key of the YAML file. Paths are absolute once :func:`load_run_config` has read them.

    ``megatron_args``: any further Megatron argument, by its name with or without leading dashes,
    ``-`` or ``_``.

    Raises:
        ConfigError: a key is unknown, missing, or has a value that is refused.
    """

    model: ModelSection
    adapter: AdapterConfig
    data: DataSection
    parallel: ParallelSection = ParallelSection()
    optimizer: OptimizerSection
    schedule: ScheduleSection
    batch: BatchSection
    checkpoint: CheckpointSection = CheckpointSection()
    seed: Whole = 1234
    output: Text
    megatron_args: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise_config_error(RunConfig, error)

    @model_validator(mode="before")
    @classmethod
    def _megatron_names(cls, values: Any) -> Any:
        given = values.get("megatron_args")
        if isinstance(given, Mapping):
            names = {str(key).lstrip("-").replace("-", "_"): value for key, value in given.items()}
            if len(names) != len(given):
                raise ValueError("megatron_args writes one argument in two spellings; keep one")
            return {**values, "megatron_args": names}
        return values

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the checkpoints."""
        return (
            Path(self.checkpoint.dir) if self.checkpoint.dir else Path(self.output) / "checkpoints"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as written to ``run.yaml``; :meth:`from_dict` builds an equal object from them."""
        return {
            **self.model_dump(mode="json", by_alias=True, exclude_none=True),
            "adapter": self.adapter.to_dict(),
        }

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], source: str = "run", folder: str | Path = "."
    ) -> RunConfig:
        """Build from a mapping as YAML gives it; relative paths are relative to ``folder``, messages begin with ``source``."""
        base = Path(folder).expanduser().resolve()
        raw = _inline_adapter(deepcopy(dict(values)), base)
        adapter = raw.get("adapter")
        if isinstance(adapter, Mapping):
            raw["adapter"] = AdapterConfig.from_dict(adapter, f"{source}: adapter")
        for path in (("model", "path"), ("data", "train"), ("checkpoint", "dir"), ("output",)):
            _make_absolute(raw, path, base)
        try:
            return cls(**raw)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run configuration from a YAML file and apply ``overrides`` such as ``"schedule.steps=40"`` (values are YAML).

    Raises:
        ConfigError: the file is not readable YAML, an override is not ``a.b=c``, or :class:`RunConfig` refuses the result.
    """
    file = Path(path).expanduser()
    raw = load_yaml(file)
    for override in overrides:
        _override(raw, override, file.resolve().parent)
    return RunConfig.from_dict(raw, str(path), file.resolve().parent)


def _override(raw: MutableMapping[str, Any], text: str, folder: Path) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {text}: expected key=value, for example schedule.steps=40")
    here = raw
    for depth, part in enumerate(parts[:-1]):
        if part == "adapter" and depth == 0:
            here.update(_inline_adapter(dict(here), folder))
        inner = here.setdefault(part, {})
        if not isinstance(inner, MutableMapping):
            raise ConfigError(
                f"--set {text}: {'.'.join(parts[: depth + 1])} is {show(inner)}, which has no keys"
            )
        here = inner
    here[parts[-1]] = parse_yaml(value, f"--set {text}")


def _inline_adapter(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``raw`` with an adapter given as a path replaced by the content of that file."""
    if isinstance(raw.get("adapter"), str):
        raw["adapter"] = load_yaml(folder / Path(raw["adapter"]).expanduser())
    return raw


def _make_absolute(raw: MutableMapping[str, Any], path: Sequence[str], folder: Path) -> None:
    here: Any = raw
    for part in path[:-1]:
        here = here.get(part) if isinstance(here, MutableMapping) else None
    if isinstance(here, MutableMapping) and isinstance(here.get(path[-1]), str) and here[path[-1]]:
        here[path[-1]] = str(folder / Path(here[path[-1]]).expanduser())
