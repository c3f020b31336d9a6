"""Several adapters on one base, and none for a while: each computes what it computes alone, to the bit, at no cost when idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, ConfigError
from tests.layers.dense import held_bytes, logits_of, tokens
from tests.training.harness import Job, Trainer, random_like, use_one_process
from tests.worlds import run_world

FIRST: dict[str, Any] = {"rank": {"routed_experts": 2, "default": 3}, "alpha": 6}
SECOND: dict[str, Any] = {
    "rank": 4,
    "alpha": 4,
    "glm52_lora_scope": "moe",
    "lora_target_modules": ["*.mlp.experts.*", "*.kv_b_proj", "lm_head"],
}


def fill(model: Any, name: str | None, salt: str) -> None:
    """Values that depend on an adapter's salt; what does not train keeps B zero."""
    from megatron_xorl.layers.attach import named_factors

    with torch.no_grad():
        for factor, piece, parameter in named_factors(model, name).values():
            if factor.trainable:
                parameter.copy_(piece.of(random_like(f"{salt}.{factor.name}", factor.shape)))


def bare(directory: Path) -> Any:
    from megatron_xorl.training.model import load_model

    return load_model(directory).eval()


def alone(directory: Path, adapter: dict[str, Any], salt: str) -> Any:
    """A model that never had another adapter."""
    from megatron_xorl.training.model import attach_adapters

    model = bare(directory)
    attach_adapters(model, AdapterConfig(**adapter))
    fill(model, None, salt)
    return model


def with_both(directory: Path) -> Any:
    import megatron_xorl as mx

    model = bare(directory)
    for name, adapter in (("first", FIRST), ("second", SECOND)):
        mx.add_adapter(model, name, AdapterConfig(**adapter))
        fill(model, name, name)
    return model


@pytest.fixture(scope="module")
def logits(tiny_dir: Path) -> dict[str | None, Tensor]:
    """Of the bare base, and of each adapter alone."""
    use_one_process()
    found: dict[str | None, Tensor] = {None: logits_of(bare(tiny_dir))}
    found["first"] = logits_of(alone(tiny_dir, FIRST, "first"))
    found["second"] = logits_of(alone(tiny_dir, SECOND, "second"))
    assert not torch.equal(found["first"], found["second"])
    return found


@pytest.fixture(scope="module")
def shared(tiny_dir: Path) -> Any:
    use_one_process()
    return with_both(tiny_dir)


@pytest.fixture
def both(shared: Any) -> Iterator[Any]:
    """``first`` and ``second``, neither active before a test."""
    from megatron_xorl.layers.switch import set_adapter

    set_adapter(shared, None)
    yield shared
    shared.eval()


# --- which one computes -------------------------------------------------------------------------------------------------


def test_each_adapter_computes_what_it_computes_alone(both: Any, logits: Any) -> None:
    import megatron_xorl as mx

    before = held_bytes(both)
    for name in (None, "first", "second", "first", None, "second"):
        mx.set_adapter(both, name)
        assert torch.equal(logits_of(both), logits[name]), name
    assert mx.adapter_names(both) == ("second", "first")
    assert all(torch.equal(held_bytes(both)[key], value) for key, value in before.items())


def test_adding_changes_nothing_that_is_computed_or_trained(tiny_dir: Path, logits: Any) -> None:
    import megatron_xorl as mx

    model = alone(tiny_dir, FIRST, "first")
    assert mx.adapter_names(model) == ("default",)
    names = [name for name, _ in model.named_parameters()]
    inventory = mx.add_adapter(model, "second", AdapterConfig(**SECOND))
    assert torch.equal(logits_of(model), logits["first"])
    assert [name for name, _ in model.named_parameters()] == names
    assert not any("second" in name for name in model.state_dict())
    assert len(inventory.factors) != len(model.inventory.factors)
    assert mx.adapter_names(model) == ("default", "second")


def test_factors_start_from_the_bytes_of_an_adapter_that_is_alone(tiny_dir: Path) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.attach import named_factors

    model, one = bare(tiny_dir), bare(tiny_dir)
    mx.add_adapter(model, "second", AdapterConfig(**SECOND), seed=7)
    mx.attach_adapters(one, AdapterConfig(**SECOND), seed=7)
    found, expected = named_factors(model, "second"), named_factors(one)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name][2], expected[name][2]) for name in expected)


@pytest.mark.parametrize("adapter", ["first", "second"])
def test_a_disabled_adapter_leaves_the_bare_base(both: Any, logits: Any, adapter: str) -> None:
    import megatron_xorl as mx

    mx.set_adapter(both, adapter)
    with mx.disable_adapters(both):
        assert torch.equal(logits_of(both), logits[None])
        with mx.disable_adapters(both):
            assert torch.equal(logits_of(both), logits[None])
        assert torch.equal(logits_of(both), logits[None])
        with pytest.raises(AdapterError, match="disabled"):
            mx.trainable_factors(both)
    assert torch.equal(logits_of(both), logits[adapter])
    with pytest.raises(ZeroDivisionError), mx.disable_adapters(both):
        _ = 1 / 0
    assert torch.equal(logits_of(both), logits[adapter])


@pytest.mark.parametrize("part", ["linear_kv_up_proj", "experts.linear_fc2", "output_layer"])
def test_one_host_that_is_not_disabled_is_seen(both: Any, logits: Any, part: str) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.base import megatron_modules

    mx.set_adapter(both, "first")
    host = next(module for name, module in megatron_modules(both).items() if name.endswith(part))
    with mx.disable_adapters(both):
        kept, host.adapters = host.adapters, host.aside[-1]
        assert not torch.equal(logits_of(both), logits[None])
        host.adapters = kept


# --- which one trains ---------------------------------------------------------------------------------------------------


def step(model: Any) -> dict[str, Tensor]:
    """One SGD step of what trains; the gradients."""
    import megatron_xorl as mx

    factors = mx.trainable_factors(model)
    ids = tokens()
    model.zero_grad(set_to_none=True)
    model(ids, torch.arange(ids.shape[1]).expand_as(ids), None, labels=ids).mean().backward()
    with torch.no_grad():
        for parameter in factors.values():
            parameter -= 0.1 * parameter.grad
    return {name: parameter.grad.clone() for name, parameter in factors.items()}


def test_one_adapter_trains_and_the_other_keeps_its_bits(tiny_dir: Path) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.attach import check_gradients, check_trainability, named_factors

    model, one = with_both(tiny_dir).train(), alone(tiny_dir, SECOND, "second").train()
    mx.set_adapter(model, "second")
    idle = {name: p.detach().clone() for name, (_, _, p) in named_factors(model, "first").items()}
    found, expected = step(model), step(one)
    check_gradients(model)
    check_trainability(model)
    assert found.keys() == expected.keys() == {f.name for f in model.inventory.trainable}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name, (_, _, parameter) in named_factors(model, "first").items():
        assert torch.equal(parameter, idle[name])
        assert parameter.grad is None and not parameter.requires_grad
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(p) for p in mx.trainable_factors(model).values()
    }


def test_casts_and_moves_reach_the_idle_ones(tiny_dir: Path) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.attach import named_factors

    model = with_both(tiny_dir)
    mx.set_adapter(model, "first")
    with mx.disable_adapters(model):
        model.bfloat16()
    for name in (None, "second"):
        assert {p.dtype for _, _, p in named_factors(model, name).values()} == {torch.bfloat16}


def test_a_switch_after_the_buffers_were_built_is_for_inference_alone(tiny_dir: Path) -> None:
    import megatron_xorl as mx

    use_one_process()
    trainer = Trainer(Job(str(tiny_dir), FIRST))
    model = trainer.module
    fill(model, None, "first")
    mx.add_adapter(model, "second", AdapterConfig(**SECOND))
    fill(model, "second", "second")
    trainer.forward_backward(1)
    before = {name: values.clone() for name, (*_, values) in trainer.gradient_pieces().items()}
    with pytest.raises(AdapterError, match=r"gradient buffers.*model\.eval\(\)"):
        mx.set_adapter(model, "second")
    model.eval()
    mx.set_adapter(model, "second")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    mx.set_adapter(model, "default")
    model.train()
    trainer.forward_backward(1)
    after = {name: values for name, (*_, values) in trainer.gradient_pieces().items()}
    assert before.keys() == after.keys() and len(before) == len(model.inventory.trainable)
    assert all(torch.equal(after[name], value) for name, value in before.items())


# --- what idle ones cost ------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts every operation by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def counted(model: Any) -> dict[str, int]:
    ids = tokens()
    model.zero_grad(set_to_none=True)
    with Operations() as operations:
        model(ids, torch.arange(ids.shape[1]).expand_as(ids), None, labels=ids).mean().backward()
    return operations.counts


def test_idle_adapters_add_no_operation(tiny_dir: Path) -> None:
    import megatron_xorl as mx
    from megatron_xorl.fp8.engine import use_fp8

    use_fp8(backend="reference")  # whose products are all operations of torch
    try:
        model = alone(tiny_dir, FIRST, "first").train()
        one = counted(model)
        assert one["aten.mm.default"] > 100
        for number in range(3):
            mx.add_adapter(model, f"idle {number}", AdapterConfig(**SECOND))
        assert counted(model) == one
        mx.set_adapter(model, None)
        mx.set_adapter(model, "idle 0")
        assert counted(model) != one
    finally:
        use_fp8()


# --- files --------------------------------------------------------------------------------------------------------------


def read(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_files_are_of_the_named_adapter(
    both: Any, tiny_dir: Path, logits: Any, tmp_path: Path
) -> None:
    import megatron_xorl as mx

    mx.set_adapter(both, "first")
    mx.export_adapter(both, tmp_path / "second", name="second")
    mx.export_adapter(both, tmp_path / "first")
    for name, adapter in (("first", FIRST), ("second", SECOND)):
        mx.export_adapter(alone(tiny_dir, adapter, name), tmp_path / "alone" / name)
        assert read(tmp_path / name) == read(tmp_path / "alone" / name)
    keys = [key for key, _ in mx.iter_adapter(both, "hf_peft", name="second")]
    assert keys and not any("shared_experts" in key for key in keys)

    model = bare(tiny_dir)
    mx.add_adapter(model, "a", tmp_path / "first")
    mx.add_adapter(model, "b", AdapterConfig(**SECOND))
    mx.load_adapter(model, tmp_path / "second", name="b")
    for name, expected in (("b", "second"), ("a", "first")):
        mx.set_adapter(model, name)
        assert torch.equal(logits_of(model), logits[expected])


def export_by_name(directory: Path, out: Path, layout: dict[str, int]) -> None:
    from megatron_xorl.layers.switch import set_adapter
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import export_adapter

    use_cpu()
    initialize(**layout)
    model = with_both(directory)
    set_adapter(model, "second")
    export_adapter(model, out, name="first")


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 2}])
def test_an_idle_adapter_is_exported_alike_from_every_layout(
    both: Any, tiny_dir: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    import megatron_xorl as mx

    mx.export_adapter(both, tmp_path / "one", name="first")
    run_world(export_by_name, 2, tiny_dir, tmp_path / "two", layout, timeout=180)
    assert read(tmp_path / "one") == read(tmp_path / "two")


# --- refused ------------------------------------------------------------------------------------------------------------

CONFIG = AdapterConfig(rank=2, alpha=2)

REFUSED: dict[str, tuple[Callable[[Any, Any, Path], Any], str]] = {
    "a name that is taken": (lambda mx, m, _: mx.add_adapter(m, "second", CONFIG), "is taken"),
    "no name": (lambda mx, m, _: mx.add_adapter(m, "", CONFIG), "is empty"),
    "an unknown name": (lambda mx, m, _: mx.set_adapter(m, "secnd"), "did you mean 'second'"),
    "an export of nothing": (lambda mx, m, out: mx.export_adapter(m, out, name="x"), "no adapter 'x'"),
    "removing the active one": (lambda mx, m, _: mx.remove_adapter(m, "first"), "is active"),
    "attaching over them": (lambda mx, m, _: mx.attach_adapters(m, CONFIG), "mx.add_adapter"),
    "a folder that is no adapter": (lambda mx, m, out: mx.add_adapter(m, "x", out), "adapter_config"),
}  # fmt: skip


@pytest.mark.parametrize("action", REFUSED)
def test_what_makes_no_sense_is_refused(
    action: str, both: Any, logits: Any, tmp_path: Path
) -> None:
    import megatron_xorl as mx

    mx.set_adapter(both, "first")
    run, message = REFUSED[action]
    with pytest.raises((AdapterError, ConfigError), match=message):
        run(mx, both, tmp_path)
    assert mx.adapter_names(both) == ("first", "second")
    assert torch.equal(logits_of(both), logits["first"])


def test_a_model_without_an_active_adapter_says_which_it_has(both: Any, tmp_path: Path) -> None:
    import megatron_xorl as mx

    with pytest.raises(AdapterError, match=r"no active adapters; .* one of first, second|one of second, first"):  # fmt: skip
        mx.export_adapter(both, tmp_path / "a")
    with pytest.raises(AdapterError, match="call attach_adapters first"):
        mx.export_adapter(bare(both.base_directory), tmp_path / "a")


def test_a_file_that_cannot_be_loaded_leaves_no_adapter_behind(
    tiny_dir: Path, tiny128_dir: Path, tmp_path: Path
) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.switch import hosts_of

    use_one_process()
    mx.export_adapter(alone(tiny_dir, FIRST, "first"), tmp_path / "a")
    other = bare(tiny128_dir)
    with pytest.raises(AdapterError, match="fingerprint"):
        mx.add_adapter(other, "a", tmp_path / "a")
    assert mx.adapter_names(other) == ()
    assert not any(host.idle for host in hosts_of(other))


def test_a_removed_adapter_is_gone(tiny_dir: Path) -> None:
    import megatron_xorl as mx
    from megatron_xorl.layers.switch import hosts_of

    model = with_both(tiny_dir)
    mx.remove_adapter(model, "first")
    assert mx.adapter_names(model) == ("second",)
    assert not any("first" in host.idle for host in hosts_of(model))
    mx.set_adapter(model, "second")
    mx.set_adapter(model, None)
    mx.remove_adapter(model, "second")
    mx.attach_adapters(model, AdapterConfig(**FIRST))  # as on a fresh model
    assert mx.adapter_names(model) == ("default",)
