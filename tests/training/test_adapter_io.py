"""Adapters from a live model and from a checkpoint to files and back, judged by an independent reader and by logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.worlds import run_world

pytestmark = pytest.mark.dist

FORMATS = ("sglang_shared_outer", "hf_peft", "hf_peft_fused")

ADAPTER = {"rank": {"routed_experts": 2, "default": 3}, "alpha": 6}
NARROW = {"rank": 2, "alpha": 4, "glm52_lora_scope": "routed_experts"}
REGIONS = ("attention", "dense_mlp", "shared_experts", "routed_experts", "lm_head")
WEIGHTS = "adapter_model.safetensors"


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(5))


def fill(model: torch.nn.Module, region: str | None = None) -> None:
    """Give every trainable factor of a region (None: all) small drawn values and zero the B of all others."""
    from megatron_xorl.layers.attach import named_factors
    from tests.workers.adapter_job import drawn

    with torch.no_grad():
        for factor, piece, parameter in named_factors(model).values():
            if factor.trainable:
                on = factor.side == "A" or region in (None, factor.region)
                parameter.copy_(piece.of(drawn(1, "master", factor)) * (0.05 if on else 0.0))


def export_live(
    model_dir: Path, folder: Path, adapter: dict[str, Any], layout: dict[str, int]
) -> dict[str, Any]:
    """Export from a live model in every format and stream it; one process also gives logits by region."""
    import torch.distributed as dist

    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import export_adapter, iter_adapter
    from megatron_xorl.training.model import forward_logits, load_model

    use_cpu()
    initialize(**layout)
    model = load_model(model_dir, AdapterConfig(**adapter))
    fill(model)
    name = "".join(f"{key}{value}" for key, value in layout.items()) or "one"
    for format in FORMATS:
        export_adapter(model, folder / f"{format} {name}", format)
        found = list(iter_adapter(model, format))
        if dist.get_rank() == 0:
            stored = load_file(folder / f"{format} {name}" / WEIGHTS)
            assert [key for key, _ in found] == header_order(folder / f"{format} {name}" / WEIGHTS)
            for key, value in found:
                assert value is not None
                assert torch.equal(value, stored[key]), key
        else:
            assert all(value is None for _, value in found)
        assert len(found) == len(load_file(folder / f"{format} {name}" / WEIGHTS))
    if layout or adapter != ADAPTER:
        return {}
    logits = {}
    with torch.no_grad():
        logits["all"] = forward_logits(model, tokens())
        for region in REGIONS:
            fill(model, region)
            logits[region] = forward_logits(model, tokens())
    return {name: value.numpy() for name, value in logits.items()}


def header_order(path: Path) -> list[str]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [key for key in header if key != "__metadata__"]


def export_saved(model_dir: Path, folder: Path) -> None:
    """Save a training checkpoint of the same factors and export that in every format."""
    import torch.distributed as dist

    from megatron_xorl.training.checkpoint_export import export_checkpoint
    from tests.workers.adapter_job import Job

    world = dist.get_world_size()
    job = Job(model_dir, ADAPTER)
    fill(job.model)
    job.save(folder / f"checkpoints {world}", 3)
    if dist.get_rank() == 0:
        for format in FORMATS:
            report = export_checkpoint(
                folder / f"checkpoints {world}", folder / f"{format} saved{world}", format
            )
            assert (report["iteration"], report["format"]) == (3, format)
            stored = load_file(folder / f"{format} saved{world}" / WEIGHTS)
            assert report["bytes"] == sum(value.nbytes for value in stored.values())


@pytest.fixture(scope="module")
def exported(
    tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with one adapter exported from several layouts, and the logits of the model it was exported from."""
    folder = tmp_path_factory.mktemp("exported")
    (logits,) = run_world(export_live, 1, tiny_dir, folder, ADAPTER, {})
    run_world(export_live, 2, tiny_dir, folder, ADAPTER, {"ep": 2})
    run_world(export_live, 2, tiny_dir, folder, ADAPTER, {"tp": 2})
    for world in (1, 2):
        run_world(export_saved, world, tiny_dir, folder)
    return folder, {name: torch.from_numpy(value) for name, value in logits.items()}


def content(directory: Path) -> dict[str, bytes]:
    """Bytes of an adapter directory; where the base lay is no part of the adapter."""
    document = json.loads((directory / "adapter_config.json").read_text())
    document.pop("base_model_name_or_path")
    config = json.dumps(document, sort_keys=True).encode()
    return {"config": config, WEIGHTS: (directory / WEIGHTS).read_bytes()}


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_has_the_same_bytes_from_every_layout_and_from_checkpoints(
    exported: tuple[Path, dict[str, torch.Tensor]], format: str
) -> None:
    folder, _ = exported
    first = content(folder / f"{format} one")
    for other in ("ep2", "tp2", "saved1", "saved2"):
        assert content(folder / f"{format} {other}") == first, other


def test_keys_and_shapes_are_those_that_servers_read(
    exported: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    found = {
        key: tuple(value.shape)
        for key, value in load_file(exported[0] / "sglang_shared_outer one" / WEIGHTS).items()
    }
    bank = "base_model.model.model.layers.2.mlp.experts"
    assert {key: shape for key, shape in found.items() if key.startswith(bank)} == {
        f"{bank}.w1.lora_A.weight": (1, 2, 128),
        f"{bank}.w1.lora_B.weight": (8, 128, 2),
        f"{bank}.w3.lora_A.weight": (1, 2, 128),
        f"{bank}.w3.lora_B.weight": (8, 128, 2),
        f"{bank}.w2.lora_A.weight": (8, 2, 128),
        f"{bank}.w2.lora_B.weight": (1, 128, 2),
    }
    assert found["base_model.model.lm_head.lora_B.weight"] == (320, 3)
    attention = "base_model.model.model.layers.0.self_attn"
    assert found[f"{attention}.kv_a_proj_with_mqa.lora_B.weight"] == (144, 3)
    assert found[f"{attention}.kv_b_proj.lora_A.weight"] == (3, 128)
    # 4 x 5 attention, 3 dense, 3 x 3 shared, 3 x 3 routed, the head; A and B of each.
    assert len(found) == 2 * (20 + 3 + 9 + 9 + 1)
    stems = {
        side: {k.replace(f"lora_{side}.", "") for k in found if f"lora_{side}." in k}
        for side in "AB"
    }
    assert stems["A"] == stems["B"]


def merge(model: torch.nn.Module, directory: Path, region: str | None, swap: bool = False) -> None:
    """Add an adapter file to transformers' weights, in twenty lines that know safetensors and the format's description alone."""
    config = json.loads((directory / "adapter_config.json").read_text())
    with safe_open(str(directory / WEIGHTS), framework="pt") as file:
        stems = {k.removesuffix(".lora_A.weight") for k in file.keys() if "lora_A" in k}  # noqa: SIM118
        for stem in stems:
            name = stem.removeprefix("base_model.model.")
            a, b = (file.get_tensor(f"{stem}.lora_{side}.weight") for side in "AB")
            leaf = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
            parent, _, last = name.rpartition(".")
            target = f"{parent}.{leaf.get(last, last)}"
            rank = config["rank_pattern"].get(target, config["r"])
            delta = (
                config["lora_alpha"] / rank * (b @ a)
            )  # a leading axis of 1 broadcasts over the experts
            if region not in (None, region_of(name)):
                continue
            if not parent.endswith(".experts"):
                model.get_parameter(f"{name}.weight").data += delta
            elif last == "w2":
                model.get_parameter(f"{parent}.down_proj").data += delta
            else:
                first = (last == "w1") != swap
                half = model.get_parameter(f"{parent}.gate_up_proj").data.chunk(2, dim=1)
                half[0 if first else 1].add_(delta)


def region_of(name: str) -> str:
    for part, region in (
        ("self_attn", "attention"),
        ("shared_experts", "shared_experts"),
        (".experts", "routed_experts"),
        ("mlp", "dense_mlp"),
    ):
        if part in name:
            return region
    return "lm_head"


def test_merged_by_an_independent_reader_into_transformers_weights_it_gives_our_logits_in_every_region(
    exported: tuple[Path, dict[str, torch.Tensor]], tiny_dir: Path
) -> None:
    from tests.oracle import hf_oracle

    folder, logits = exported
    oracle = hf_oracle(tiny_dir)
    plain = {name: value.clone() for name, value in oracle.state_dict().items()}
    with torch.no_grad():
        base = oracle(tokens()).logits
        for name in ("all", *REGIONS):
            oracle.load_state_dict(plain)
            merge(oracle, folder / "sglang_shared_outer one", None if name == "all" else name)
            expected = oracle(tokens()).logits
            assert (expected - logits[name]).abs().max() <= 1e-5, name
            assert (expected - base).abs().max() > 1e-2, name
        # The control: gate and up in each other's place are another model.
        oracle.load_state_dict(plain)
        merge(oracle, folder / "sglang_shared_outer one", "routed_experts", swap=True)
        assert (oracle(tokens()).logits - logits["routed_experts"]).abs().max() > 1e-2


def load_back(model_dir: Path, directory: Path) -> dict[str, Any]:
    """Load an adapter into a fresh model of this layout; return its factors' faults and, in one process, the logits."""
    import torch.distributed as dist

    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import load_adapter
    from megatron_xorl.training.model import forward_logits, load_model
    from tests.workers.adapter_job import drawn

    use_cpu()
    initialize(ep=dist.get_world_size())
    model = load_model(model_dir, dtype=torch.float32)
    load_adapter(model, directory)
    wrong = [
        name
        for name, (factor, piece, parameter) in named_factors(model).items()
        if not torch.equal(parameter, piece.of(drawn(1, "master", factor)) * 0.05)
    ]
    with torch.no_grad():
        logits = forward_logits(model, tokens())
    return {"wrong": wrong, "factors": len(named_factors(model)), "logits": logits.numpy()}


@pytest.mark.parametrize("world", [1, 2])
def test_loading_an_export_gives_the_factors_and_the_logits_back(
    exported: tuple[Path, dict[str, torch.Tensor]], tiny_dir: Path, world: int
) -> None:
    folder, logits = exported
    for found in run_world(load_back, world, tiny_dir, folder / "sglang_shared_outer one"):
        assert (found["wrong"], found["factors"]) == ([], 84)
        if world == 1:
            assert torch.equal(torch.from_numpy(found["logits"]), logits["all"])


@pytest.mark.parametrize("format", FORMATS[1:])
def test_the_peft_forms_load_into_two_ranks_as_well(
    exported: tuple[Path, dict[str, torch.Tensor]], tiny_dir: Path, format: str
) -> None:
    for found in run_world(load_back, 2, tiny_dir, exported[0] / f"{format} one"):
        assert (found["wrong"], found["factors"]) == ([], 84)


def load_narrow(model_dir: Path, folder: Path) -> dict[str, Any]:
    """Export a narrow adapter and load it into a model of full scope that has other values; compare all logits."""
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import export_adapter, load_adapter
    from megatron_xorl.training.model import forward_logits, load_model

    use_cpu()
    initialize()
    narrow = load_model(model_dir, AdapterConfig(**NARROW))
    fill(narrow)
    full = load_model(model_dir, AdapterConfig(**(NARROW | {"glm52_lora_scope": "all"})))
    found = {}
    with torch.no_grad():
        found["narrow"] = forward_logits(narrow, tokens())
        for format in FORMATS:
            export_adapter(narrow, folder / format, format)
            fill(full)
            load_adapter(full, folder / format)
            found[format] = forward_logits(full, tokens())
        path = folder / "hf_peft/adapter_config.json"
        document = json.loads(path.read_text())
        del document["megatron_xorl"]
        path.write_text(json.dumps(document))
        try:
            load_adapter(full, folder / "hf_peft")
        except Exception as error:
            found["refused"] = str(error)
        fill(full)
        load_adapter(full, folder / "hf_peft", allow_missing=True)
        found["allowed"] = forward_logits(full, tokens())
    return {name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in found.items()}


def test_a_narrow_export_holds_what_trained_and_means_the_same_in_a_model_of_full_scope(
    tiny_dir: Path, tmp_path: Path
) -> None:
    (found,) = run_world(load_narrow, 1, tiny_dir, tmp_path)
    for name in (*FORMATS, "allowed"):
        assert (found[name] == found["narrow"]).all(), name
    assert "66 factors missing" in found["refused"]
    keys = load_file(tmp_path / "sglang_shared_outer" / WEIGHTS).keys()
    assert len(keys) == 2 * 9
    assert all(".mlp.experts.w" in key for key in keys)
    config = json.loads((tmp_path / "sglang_shared_outer/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]
    assert config["megatron_xorl"]["adapter"]["glm52_lora_scope"] == "routed_experts"


def export_badly(model_dir: Path, out: Path) -> tuple[str, str]:
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import export_adapter
    from megatron_xorl.training.model import load_model

    use_cpu()
    initialize(ep=2)
    model = load_model(model_dir, AdapterConfig(**NARROW))
    try:
        export_adapter(model, out)
    except Exception as error:
        return type(error).__name__, str(error)
    return "accepted", ""


def test_what_only_rank_0_sees_is_raised_on_every_rank(tiny_dir: Path, tmp_path: Path) -> None:
    """A rank 0 that left alone would let the others wait in the next reduction."""
    (tmp_path / "file").write_text("x")
    first, second = run_world(export_badly, 2, tiny_dir, tmp_path / "file/out")
    assert first == second
    assert first[0] == "AdapterError"
    assert "file is no folder; choose another output directory" in first[1]


def _nan(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["base_model.model.lm_head.lora_B.weight"][-1, -1] = float("nan")
    save_file(tensors, directory / WEIGHTS)


def load_badly(model_dir: Path, directory: Path) -> tuple[str, bool]:
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import load_adapter
    from megatron_xorl.training.model import load_model

    use_cpu()
    initialize(tp=2)
    model = load_model(model_dir, AdapterConfig(**ADAPTER))
    before = {name: p.detach().clone() for name, (*_, p) in named_factors(model).items()}
    try:
        load_adapter(model, directory)
    except Exception as error:
        after = named_factors(model)
        same = all(torch.equal(value, after[name][2]) for name, value in before.items())
        return f"{type(error).__name__}: {error}", same
    return "accepted", False


def test_a_fault_in_the_last_value_that_one_rank_reads_changes_no_rank(
    exported: tuple[Path, dict[str, torch.Tensor]], tiny_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported[0] / "sglang_shared_outer one", tmp_path / "a")
    _nan(tmp_path / "a")
    for told, same in run_world(load_badly, 2, tiny_dir, tmp_path / "a"):
        assert told.startswith(
            "AdapterError: base_model.model.lm_head.lora_B.weight has 1 inf or NaN"
        )
        assert same


# --- refusals --------------------------------------------------------------------------------------------------------


def _drop(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors.pop("base_model.model.lm_head.lora_B.weight")
    save_file(tensors, directory / WEIGHTS)


def _add(target: str) -> Callable[[Path], None]:
    def add(directory: Path) -> None:
        key = f"base_model.model.{target}.lora_A.weight"
        save_file(load_file(directory / WEIGHTS) | {key: torch.zeros(1)}, directory / WEIGHTS)

    return add


def _reshape(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(320, 5)
    save_file(tensors, directory / WEIGHTS)


def _truncate(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "adapter_config.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return edit


def _other_alpha(document: dict[str, Any]) -> None:
    document["lora_alpha"] = document["megatron_xorl"]["adapter"]["alpha"] = 12


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("missing key", _drop, "lm_head has lora_A alone, lora_B is missing"),
    ("foreign key", _add("extra"), "base_model.model.extra.lora_A.weight, which is no LoRA factor"),
    ("other shape", _reshape, "lm_head has lora_A [3, 128] and lora_B [320, 5]"),
    ("truncated", _truncate, "adapter_model.safetensors cannot be read"),
    (
        "other base",
        _config(lambda c: c["megatron_xorl"].update(base_fingerprint="f" * 64)),
        "trained on a base with fingerprint ffffffffffff",
    ),
    (
        "other rank",
        _config(lambda c: c["megatron_xorl"]["adapter"].update(rank=4)),
        "the model needs [4, 128]; it is of another base or rank",
    ),
    (
        "other alpha",
        _config(_other_alpha),
        "scales model.layers.0.self_attn.q_a_proj by 4, the model's adapter config by 2",
    ),
    (
        "narrower than it says",
        _config(lambda c: c["megatron_xorl"]["adapter"].update(glm52_lora_scope="moe")),
        "does not fit the model: 0 factors missing, 48 extra",
    ),
]


def refusals(model_dir: Path, good: Path, damaged: list[Path], out: Path) -> list[Any]:
    """Return ``(error, message)`` of every load and export that has to be refused."""
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import export_adapter, load_adapter
    from megatron_xorl.training.model import attach_adapters, load_model

    use_cpu()
    initialize()
    found = []
    attached = load_model(model_dir, AdapterConfig(**ADAPTER))
    bare = load_model(model_dir)
    attempts: list[Callable[[], Any]] = [
        lambda: export_adapter(bare, out),
        lambda: export_adapter(attached, out, format="hf_peff"),
        lambda: export_adapter(attached, good),
    ]

    def load_damaged(directory: Path) -> None:
        # The ranks of the file decide when the model has no adapters yet.
        target = load_model(model_dir) if "rank" in directory.name else attached
        load_adapter(target, directory)

    attempts += [lambda directory=directory: load_damaged(directory) for directory in damaged]
    other = load_model(model_dir, AdapterConfig(rank=4, alpha=8))
    attempts.append(lambda: load_adapter(other, good))
    attempts += [
        lambda changes=changes: attach_adapters(bare, AdapterConfig(rank=2, alpha=4, **changes))
        for changes in ({"indexer": "kl"},)
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("accepted", ""))
    load_adapter(attached, good)
    return found


def test_adapters_that_do_not_fit_are_refused_in_one_line(
    exported: tuple[Path, dict[str, torch.Tensor]], tiny_dir: Path, tmp_path: Path
) -> None:
    good = exported[0] / "sglang_shared_outer one"
    damaged = []
    for name, damage, _ in DAMAGE:
        directory = tmp_path / name
        shutil.copytree(good, directory)
        damage(directory)
        damaged.append(directory)
    expected = ["carries no adapters; call attach_adapters", "did you mean 'hf_peft'", "exists"]
    expected += [text for _, _, text in DAMAGE]
    expected += ["the model needs", "indexer is kl"]
    (found,) = run_world(refusals, 1, tiny_dir, good, damaged, tmp_path / "out")
    assert len(found) == len(expected)
    for (kind, message), text in zip(found, expected, strict=True):
        assert (kind, text in message) == ("AdapterError", True), (kind, message, text)
        assert "\n" not in message
    assert not (tmp_path / "out").exists()
