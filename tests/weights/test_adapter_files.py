"""Adapter directories: complete or not written, a factor at a time, sharded above a size, damaged ones refused by name."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.adapters.formats import FORMATS
from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.adapter_writer import write_adapter

ADAPTER = AdapterConfig(rank={"routed_experts": 2, "default": 3}, alpha=6)
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
INDEX = "adapter_model.safetensors.index.json"


def inventory() -> Inventory:
    return build_inventory(load_glm_config("tiny"), ADAPTER, dtype="float32")


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f.name: torch.randn(f.shape, generator=generator) for f in inventory().factors}


def write(out: Path, tensors: Any = None, **named: Any) -> Path:
    return write_adapter(
        out,
        inventory().trainable,
        values() if tensors is None else tensors,
        ADAPTER,
        base_model="base",
        base_fingerprint="f" * 64,
        **named,
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("max_bytes", [None, 50_000, 1])
def test_sharded_or_not_the_content_is_the_same(
    tmp_path: Path, max_bytes: int | None, format: str
) -> None:
    bound = {} if max_bytes is None else {"max_bytes": max_bytes}
    out = write(tmp_path / "a", format=format, **bound)
    weights = sorted(path.name for path in out.glob("*.safetensors"))
    stored: dict[str, torch.Tensor] = {}
    for name in weights:
        part = load_file(out / name)
        assert not stored.keys() & part.keys()
        small = sum(t.nbytes for t in part.values())
        assert max_bytes is None or len(part) == 1 or small <= max_bytes
        stored |= part
    if max_bytes is None:
        assert (weights, (out / INDEX).exists()) == ([WEIGHTS], False)
    else:
        assert len(weights) > 1
        assert json.loads((out / INDEX).read_text())["weight_map"].keys() == stored.keys()
    file = AdapterFile(out)
    assert (file.format, file.factors) == (format, inventory().trainable)
    assert file.keys() == stored.keys()
    for factor in inventory().factors:
        assert torch.equal(file.read(factor), values()[factor.name]), factor.name
    assert not list(tmp_path.glob("*.partial"))


def test_a_fused_bank_is_what_peft_reads_as_a_product_of_each_expert(tmp_path: Path) -> None:
    """PEFT reads A as [E, r, in] and B as [out, r, E]; gate is above up, and B has nothing off the blocks."""
    stored = load_file(write(tmp_path / "a", format="hf_peft_fused") / WEIGHTS)
    bank = "base_model.model.model.layers.1.mlp.experts"
    a = stored[f"{bank}.base_layer.lora_A.weight"].reshape(8, 4, 128)
    b = stored[f"{bank}.base_layer.lora_B.weight"].reshape(256, 4, 8)
    root = "model.layers.1.mlp.experts"
    given = {
        leaf: [values()[f"{root}.{leaf}_proj.lora_{side}"] for side in "AB"]
        for leaf in ("gate", "up", "down")
    }
    for expert in range(8):
        product = b[:, :, expert] @ a[expert]
        halves = [given[leaf][1][expert] @ given[leaf][0][0] for leaf in ("gate", "up")]
        assert torch.allclose(product, torch.cat(halves), atol=1e-5)
    a = stored[f"{bank}.lora_A.weight"].reshape(8, 2, 128)
    b = stored[f"{bank}.lora_B.weight"].reshape(128, 2, 8)
    for expert in range(8):
        expected = given["down"][1][0] @ given["down"][0][expert]
        assert torch.allclose(b[:, :, expert] @ a[expert], expected, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("leaf", ["gate_proj.lora_A", "gate_proj.lora_B", "down_proj.lora_A"])
def test_a_slice_is_read_as_a_slice_of_the_whole(tmp_path: Path, leaf: str, format: str) -> None:
    factor = inventory().by_name[f"model.layers.1.mlp.experts.{leaf}"]
    experts = slice(0, 1) if factor.shared else slice(4, 8)
    slices = (experts, slice(1, 2), slice(None)) if leaf.endswith("A") else (experts, slice(0, 64), slice(None))  # fmt: skip
    file = AdapterFile(write(tmp_path / "a", format=format))
    assert torch.equal(file.read(factor, slices), values()[factor.name][slices])


def test_writing_takes_one_factor_at_a_time(tmp_path: Path) -> None:
    """A generator that hands out tensors sees the one before the last freed, but for the halves of a bank."""
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for factor in inventory().trainable:
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = torch.zeros(factor.shape)
            alive.append(weakref.ref(tensor))
            yield factor.name, tensor
            del tensor

    for format, bound in (("sglang_shared_outer", 2), ("hf_peft", 2), ("hf_peft_fused", 5)):
        alive.clear()
        most = 0
        write(tmp_path / format, stream(), format=format)
        assert most <= bound, format


def test_an_existing_output_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine.txt").write_text("kept")
    with pytest.raises(AdapterError, match="exists; choose another output"):
        write(tmp_path / "a")
    assert (tmp_path / "a/mine.txt").read_text() == "kept"


OUTPUTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("file/a", lambda f: (f / "file").write_text("x"), r"cannot be made: .*file is no folder"),
    ("loop/a", lambda f: (f / "loop").symlink_to("loop"), "Too many levels of symbolic links.*check the path"),
    ("loop", lambda f: (f / "loop").symlink_to("loop"), "loop exists; choose another"),
    ("dangling", lambda f: (f / "dangling").symlink_to("nothing"), "dangling exists; choose another"),
    ("a" * 300, lambda f: None, "File name too long.*choose a shorter name"),
    ("a\0b", lambda f: None, "has a zero byte"),
    ("a", lambda f: (f / "a.partial").write_text("x"), "a.partial is in the way and no folder"),
    ("a", lambda f: [(f / "a.partial").mkdir(), (f / "a.partial/mine.txt").touch()], "holds mine.txt; move it away"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arrange", "says"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_an_output_that_cannot_be_made_is_one_error_and_nothing_is_lost(
    tmp_path: Path, name: str, arrange: Callable[[Path], Any], says: str
) -> None:
    arrange(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AdapterError, match=says) as caught:
        write(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


B = "lm_head.lora_B"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(B), f"{B} is missing"),
        (lambda t: t.update({B: torch.zeros(320, 5)}), r"lm_head.lora_B is \[320, 5\], expected \[320, 3\]"),
        (lambda t: t.update(other=torch.zeros(1)), "other is not a factor of this adapter"),
    ],
)  # fmt: skip
def test_an_incomplete_adapter_is_not_written(
    tmp_path: Path, change: Callable[[Any], Any], complaint: str, streamed: bool
) -> None:
    tensors = values()
    change(tensors)
    with pytest.raises(AdapterError, match=complaint):
        write(tmp_path / "a", iter(tensors.items()) if streamed else tensors)
    assert list(tmp_path.iterdir()) == []


def test_half_a_pair_is_not_written(tmp_path: Path) -> None:
    factors = tuple(factor for factor in inventory().factors if factor.name != B)
    tensors = {factor.name: values()[factor.name] for factor in factors}
    with pytest.raises(AdapterError, match="lm_head has only lora_A"):
        write_adapter(
            tmp_path / "a", factors, tensors, ADAPTER, base_model="b", base_fingerprint="f"
        )


def test_a_writer_that_is_killed_leaves_no_adapter_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert AdapterFile(write(tmp_path / "a")).factors == inventory().trainable
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10))
        with pytest.raises(AdapterError, match="has 10 bytes free, the adapter takes"):
            write(tmp_path / "a")
    with monkeypatch.context() as patched:

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(os, "fsync", full)
        with pytest.raises(AdapterError, match=r"No space left on device.*free some space"):
            write(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_fills_up_midway_leaves_nothing(tmp_path: Path) -> None:
    """A real write error, from the kernel: the file size limit of this process."""
    import resource
    import signal

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        with pytest.raises(AdapterError, match=r"a could not be written .*nothing is left of it"):
            write(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


# --- damaged and foreign directories --------------------------------------------------------------------------------


def tensors_of(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        tensors = load_file(out / WEIGHTS)
        change(tensors)
        save_file(tensors, out / WEIGHTS)

    return damage


def config_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        document = json.loads((out / CONFIG).read_text())
        change(document)
        (out / CONFIG).write_text(json.dumps(document))

    return damage


def header(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    size = len(text) if length is None else length
    return lambda out: (out / WEIGHTS).write_bytes(size.to_bytes(8, "little") + text)


def index(text: str) -> Callable[[Path], None]:
    return lambda out: (out / INDEX).write_text(text)


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        tensors = load_file(out / WEIGHTS)
        save_file({key.replace(old, new): value for key, value in tensors.items()}, out / WEIGHTS)

    return damage


def pickled(out: Path) -> None:
    (out / WEIGHTS).unlink()
    (out / "adapter_model.bin").write_bytes(pickle.dumps({}))


HEAD = "base_model.model.lm_head"
DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda out: (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-7]), f"{WEIGHTS} cannot be read"),
    (lambda out: (out / WEIGHTS).write_bytes(b""), f"{WEIGHTS} cannot be read"),
    (lambda out: (out / WEIGHTS).unlink(), f"{WEIGHTS} cannot be read"),
    (header(b"{}", 2**62), "header claims 4611686018427387904 bytes"),
    (header(b"[" * 90_000), "header is damaged"),
    (header(b"{}"), "holds no tensor"),
    (pickled, r"pickled weights \(adapter_model.bin\); loading them would run code"),
    (index("{"), "is no JSON"),
    (index("[]"), "is no index of shards"),
    (index('{"weight_map": 3}'), "is no index of shards"),
    (index('{"weight_map": {"a": "../b.safetensors"}}'), "not a file of this index's directory"),
    (index('{"weight_map": {"a": "/etc/b.safetensors"}}'), "not a file of this index's directory"),
    (index('{"weight_map": {"a": "b.bin"}}'), "expected a .safetensors file: pickled weights run code"),
    (index('{"weight_map": {"a": 3}}'), "names 3"),
    (index(f'{{"weight_map": {{"a": "{WEIGHTS}"}}}}'), "which the index puts into None"),
    (tensors_of(lambda t: t.update(x=torch.ones(2, 2))), "holds x, which is no LoRA factor"),
    (tensors_of(lambda t: t.pop(f"{HEAD}.lora_B.weight")), "lm_head has lora_A alone"),
    (tensors_of(lambda t: [t.pop(f"{HEAD}.lora_{s}.weight") for s in "AB"]), "does not hold the factors"),
    (tensors_of(lambda t: t.update({f"{HEAD}.lora_B.weight": torch.zeros(320, 5)})), "ranks 3 and 5 differ"),
    (tensors_of(lambda t: t.update({f"{HEAD}.lora_B.weight": torch.zeros(320, 0)})), "none of size zero"),
    (tensors_of(lambda t: t.update({f"{HEAD}.lora_A.weight": torch.zeros(3, 128).int()})), "is I32, expected one of BF16"),
    (lambda out: (out / CONFIG).unlink(), "has no adapter_config.json"),
    (lambda out: (out / CONFIG).write_text("{"), "is no JSON"),
    (lambda out: (out / CONFIG).write_text("[" * 90_000), "is no JSON"),
    (lambda out: (out / CONFIG).write_text("3"), "holds no JSON object"),
    (config_of(lambda c: c.update(base_model_name_or_path=3)), "base_model_name_or_path is 3"),
    (config_of(lambda c: c.pop("base_model_name_or_path")), "base_model_name_or_path is None"),
    (config_of(lambda c: c.update(megatron_xorl=3)), "a megatron_xorl section without format"),
    (config_of(lambda c: c.update(megatron_xorl={"format": "other"})), "format is 'other'"),
    (config_of(lambda c: c.update(megatron_xorl={"format": "hf_peft"})), "lacks adapter or base_fingerprint"),
    (config_of(lambda c: c["megatron_xorl"].update(format="hf_peft")), "the keys are those of sglang_shared_outer"),
    (config_of(lambda c: c.update(lora_alpha=7)), "lora_alpha is 7, its megatron_xorl section says 6"),
    (config_of(lambda c: c.update(r=99)), "r is 99, its megatron_xorl section says 3"),
    (config_of(lambda c: c.update(use_rslora=True)), "use_rslora is True, its megatron_xorl section says False"),
    (config_of(lambda c: c.update(rank_pattern={})), "rank_pattern is {}, its megatron_xorl section says"),
    (config_of(lambda c: c.update(use_dora=True)), "use_dora is True, which is not supported"),
    (config_of(lambda c: c.update(alpha_pattern=[1])), r"alpha_pattern is \[1\], expected an object"),
    (config_of(lambda c: c["megatron_xorl"].update(format_version=2)), "format_version 2, this version reads 1"),
    (lambda out: [(out / CONFIG).unlink(), os.mkfifo(out / CONFIG)], f"{CONFIG} is a pipe, expected a file"),
    (lambda out: [(out / WEIGHTS).unlink(), os.mkfifo(out / WEIGHTS)], "is a pipe, expected a file"),
    (lambda out: [(out / CONFIG).unlink(), (out / CONFIG).symlink_to(CONFIG)], "Too many levels of symbolic links"),
    (lambda out: [(out / CONFIG).unlink(), (out / CONFIG).mkdir()], f"{CONFIG} is a folder, expected a file"),
    (lambda out: (out / INDEX).mkdir(), f"{INDEX} is a folder, expected a file"),
    (lambda out: (out / INDEX).symlink_to(INDEX), "Too many levels of symbolic links"),
    (lambda out: (out / INDEX).symlink_to("nothing"), f"{INDEX} is a link to nothing"),
    (index('{"weight_map": {}}'), "is no index of shards"),
    (lambda out: (out / CONFIG).write_bytes(b'{"a": "\xff"}'), "is no JSON .*utf-8"),
    (lambda out: (out / CONFIG).write_text('{"r": 1, "r": 2}'), "is no JSON .*key 'r' appears twice"),
    (lambda out: (out / CONFIG).write_text('{"r": ' + "9" * 5000 + "}"), "is no JSON"),
    (renamed("self_attn.q_a_proj", "self_attn.q_proj"), r"q_proj.lora_A.weight, .*nearest: .*0.self_attn.q_[ab]_proj.lora_A"),
    (renamed("base_model.model.", ""), r"holds lm_head.lora_A.weight, .*nearest: base_model.model.lm_head.lora_A.weight"),
    (renamed("mlp.down_proj", "mlp.dense_4h_to_h"), "dense_4h_to_h.lora_A.weight, which is no LoRA factor"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "complaint"), DAMAGE)
def test_a_damaged_directory_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], Any], complaint: str
) -> None:
    out = write(tmp_path / "a")
    AdapterFile(out)
    damage(out)
    with pytest.raises(AdapterError, match=complaint) as caught:
        AdapterFile(out)
    assert "\n" not in str(caught.value)


def test_a_missing_or_damaged_shard_is_named(tmp_path: Path) -> None:
    out = write(tmp_path / "a", max_bytes=50_000)
    shard = sorted(out.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(AdapterError, match=f"{shard.name} cannot be read"):
        AdapterFile(out)
    shard.write_bytes(content[:-7])
    with pytest.raises(AdapterError, match=f"{shard.name} cannot be read"):
        AdapterFile(out)


def test_a_folder_that_is_missing_or_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        AdapterFile(tmp_path / "none")
    out = write(tmp_path / "a")
    with pytest.raises(AdapterError, match="is a file; give the folder"):
        AdapterFile(out / WEIGHTS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_factor_with_inf_or_nan_is_refused_when_it_is_read(tmp_path: Path, value: float) -> None:
    factor, other = inventory().trainable[:2]
    tensors = values()
    tensors[factor.name][0, 1] = value
    file = AdapterFile(write(tmp_path / "a", tensors))
    file.read(other)
    with pytest.raises(AdapterError, match="has 1 inf or NaN values of"):
        file.read(factor)


@pytest.mark.parametrize("format", ["hf_peft", "hf_peft_fused"])
def test_copies_of_a_shared_factor_that_differ_are_refused_and_the_first_is_named(
    tmp_path: Path, format: str
) -> None:
    out = write(tmp_path / "a", format=format)
    tensors = load_file(out / WEIGHTS)
    bank = "base_model.model.model.layers.2.mlp.experts"
    if format == "hf_peft":
        tensors[f"{bank}.5.gate_proj.lora_A.weight"][0, 0] += 1
    else:
        tensors[f"{bank}.base_layer.lora_A.weight"][5 * 4, 0] += 1
    save_file(tensors, out / WEIGHTS)
    file = AdapterFile(out)
    names = inventory().by_name
    file.read(names["model.layers.2.mlp.experts.up_proj.lora_A"])
    with pytest.raises(AdapterError, match="between expert 0 and expert 5"):
        file.read(names["model.layers.2.mlp.experts.gate_proj.lora_A"])


def test_gate_and_up_that_mix_are_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "a", format="hf_peft_fused")
    tensors = load_file(out / WEIGHTS)
    tensors["base_model.model.model.layers.2.mlp.experts.base_layer.lora_B.weight"][:] = 1
    save_file(tensors, out / WEIGHTS)
    with pytest.raises(AdapterError, match="mixes the ranks of gate and up"):
        AdapterFile(out).read(inventory().by_name["model.layers.2.mlp.experts.up_proj.lora_B"])
