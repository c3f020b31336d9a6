"""Adapter checkpoints: what is in the files, what a killed save leaves, what is refused.

The jobs hold the factors of the tiny model without its base. Every value in them is drawn from its logical name by the test, so
that the files are compared with the draw and never with what the product read back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.resume import LATEST
from tests.workers.adapter_job import ADAPTER, KINDS, Job, drawn
from tests.worlds import run_world, start_world

pytestmark = pytest.mark.dist

SMALL = {"rank": 2, "alpha": 4, "lora_target_modules": ["*.layers.1.mlp.experts.*", "lm_head"]}
"""Per-expert factors, shared ones and an ordinary pair: enough for what does not depend on names."""


def save_filled(
    model: Path, root: Path, seed: int, iteration: int, adapter: dict[str, Any], swap: bool = False
) -> None:
    """Save a job of drawn values; ``swap`` lets the two expert ranks write each other's place (the negative control)."""
    import megatron_xorl.training.checkpoint as product

    if swap:
        right = product._box
        product._box = lambda data, piece: right(data, _other_expert_rank(piece))
    job = Job(model, adapter, base=False, bf16=True)
    job.fill(seed)
    job.save(root, iteration)


def _other_expert_rank(piece: Any) -> Any:
    rank, size = piece.ep
    return type(piece)(piece.factor, piece.tp, (size - 1 - rank, size))


@pytest.fixture(scope="module")
def saved(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Roots that hold iteration 3 of the same state, saved by one process and by two (EP=2)."""
    folder = tmp_path_factory.mktemp("saved")
    for world in (1, 2):
        run_world(save_filled, world, tiny_dir, folder / str(world), 1, 3, ADAPTER)
    return {world: folder / str(world) for world in (1, 2)}


@pytest.fixture(scope="module")
def small(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that holds iteration 3 of a small job, saved by two processes."""
    root = tmp_path_factory.mktemp("small") / "root"
    run_world(save_filled, 2, tiny_dir, root, 1, 3, SMALL)
    return root


def inventory(adapter: dict[str, Any]) -> Inventory:
    return build_inventory(load_glm_config("tiny"), AdapterConfig(**adapter), dtype="bfloat16")


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint with torch alone, in this process."""
    metadata = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(str(directory)), no_dist=True)
    return state


def wrong_values(directory: Path, adapter: dict[str, Any], seed: int) -> list[str]:
    """Keys whose tensor is not the drawn one."""
    tensors = read_tensors(directory)
    wrong = []
    for factor in inventory(adapter).factors:
        master = drawn(seed, "master", factor)
        expected = {f"{kind}/{factor.name}": drawn(seed, kind, factor) for kind in KINDS}
        expected[f"lora/{factor.name}"] = master.bfloat16()
        wrong += [key for key, value in expected.items() if not torch.equal(tensors[key], value)]
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_the_manifest_lists_every_file_with_its_size_and_hash(
    saved: dict[int, Path], world: int
) -> None:
    directory = saved[world] / "iter_0000003"
    manifest = json.loads((directory / "manifest.json").read_text())
    found = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in directory.iterdir()
        if path.name != "manifest.json"
    }
    assert manifest["files"] == found
    assert {f"__{rank}_0.distcp" for rank in range(world)} < found.keys()
    assert (manifest["format_version"], manifest["iteration"]) == (1, 3)
    assert (saved[world] / "latest").read_text() == "3\n"
    assert sorted(path.name for path in saved[world].iterdir()) == ["iter_0000003", "latest"]


@pytest.mark.parametrize("world", [1, 2])
def test_state_is_keyed_by_logical_names_in_full_logical_shapes_and_nothing_else_is_there(
    saved: dict[int, Path], world: int
) -> None:
    tensors = read_tensors(saved[world] / "iter_0000003")
    factors = inventory(ADAPTER).factors
    expected = {
        f"{kind}/{factor.name}": factor.shape for factor in factors for kind in ("lora", *KINDS)
    }
    state = {key: tuple(value.shape) for key, value in tensors.items() if "lora_" in key}
    assert state == expected
    rest = tensors.keys() - expected.keys()
    assert {key for key in rest if not re.fullmatch(r"rng/[01]/[a-z._-]+", key)} == set()
    assert {key.split("/")[1] for key in rest} == {str(rank) for rank in range(world)}


@pytest.mark.parametrize("world", [1, 2])
def test_the_values_in_the_file_are_the_same_whatever_layout_saved_them(
    saved: dict[int, Path], world: int
) -> None:
    assert wrong_values(saved[world] / "iter_0000003", ADAPTER, 1) == []


def test_expert_ranks_in_each_others_place_would_be_seen(tiny_dir: Path, tmp_path: Path) -> None:
    run_world(save_filled, 2, tiny_dir, tmp_path, 1, 3, SMALL, swap=True)
    wrong = wrong_values(tmp_path / "iter_0000003", SMALL, 1)
    per_expert = ("gate_proj.lora_B", "up_proj.lora_B", "down_proj.lora_A")
    assert {key.partition("experts.")[2] for key in wrong} == set(per_expert)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_has_the_bytes_of_factors_masters_and_moments_and_no_more(
    saved: dict[int, Path], world: int
) -> None:
    directory = saved[world] / "iter_0000003"
    tensors = read_tensors(directory)
    parameters = sum(factor.numel for factor in inventory(ADAPTER).factors)
    random_state = sum(t.nbytes for key, t in tensors.items() if key.startswith("rng/"))
    assert sum(t.nbytes for t in tensors.values()) == parameters * (2 + 3 * 4) + random_state
    on_disk = sum(path.stat().st_size for path in directory.glob("*.distcp"))
    envelope = 2048 * len(tensors)  # each tensor is a small zip file of its own
    assert on_disk < parameters * 14 + random_state + envelope


# --- a killed save --------------------------------------------------------------------------------------------------------


def save_and_die(model: Path, root: Path, iteration: int, moment: str, victim: int) -> None:
    """Save drawn values of seed 2 and kill -9 one rank at a moment of it."""
    job = Job(model, SMALL, base=False, bf16=True)
    job.fill(2)
    if int(os.environ["RANK"]) == victim:
        MOMENTS[moment](root)
    job.save(root, iteration)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before(owner: str, function: str) -> Callable[[Path], None]:
    def arm(root: Path) -> None:
        import importlib

        setattr(importlib.import_module(f"megatron_xorl.{owner}"), function, _die)

    return arm


def _die_after(owner: str, function: str) -> Callable[[Path], None]:
    def arm(root: Path) -> None:
        import importlib

        module = importlib.import_module(f"megatron_xorl.{owner}")
        original = getattr(module, function)
        setattr(module, function, lambda *args, **named: (original(*args, **named), _die()))

    return arm


def _die_when_renaming_to(name: str) -> Callable[[Path], None]:
    def arm(root: Path) -> None:
        for function in ("rename", "replace"):
            setattr(os, function, _unless(getattr(os, function), name))

    return arm


def _unless(original: Callable[..., None], name: str) -> Callable[..., None]:
    def renamed(source: Any, target: Any) -> None:
        if Path(target).name == name:
            _die()
        original(source, target)

    return renamed


MOMENTS: dict[str, Callable[[Path], None]] = {
    "before its file": _die_before("training.checkpoint", "_boxes_to_save"),
    "after its file": _die_before("training.checkpoint", "_describe_all"),
    "before the manifest": _die_before("training.checkpoint", "write_manifest"),
    "manifest written, not named": _die_when_renaming_to("manifest.json"),
    "after the manifest": _die_after("training.checkpoint", "write_manifest"),
    "old one moved aside": _die_when_renaming_to("iter_0000003"),
    "directory named": _die_when_renaming_to("latest"),
}

# (moment, rank that dies, iteration that is saved, iteration and seed of what must be loaded afterwards)
KILLS = [
    ("before its file", 1, 6, (3, 1)),
    ("after its file", 1, 6, (3, 1)),
    ("before the manifest", 0, 6, (3, 1)),
    ("manifest written, not named", 0, 6, (3, 1)),
    ("after the manifest", 0, 6, (3, 1)),
    ("directory named", 0, 6, (3, 1)),
    ("old one moved aside", 0, 3, (3, 1)),
    ("directory named", 0, 3, (3, 2)),
]


def load_each(model: Path, roots: list[Path], save_again: int | None) -> list[Any]:
    """Load every root; return the iteration and the seed whose draw the job then holds (None: a mixture)."""
    job = Job(model, SMALL, base=False, bf16=True)
    draws = {}
    for seed in (1, 2):
        job.fill(seed)
        draws[seed] = drawn_state(job)
    found = []
    for root in roots:
        job.fill(7)
        iteration = job.load(root)
        seeds = [seed for seed, state in draws.items() if state == drawn_state(job)]
        found.append((iteration, seeds[0] if seeds else None))
        if save_again is not None:
            job.save(root, save_again)
            job.fill(7)
            assert job.load(root) == save_again
            assert not seeds or drawn_state(job) == draws[seeds[0]]
    return found


def drawn_state(job: Job) -> dict[str, str]:
    return {
        key: value
        for key, value in job.state().items()
        if not key.startswith(("rng", "scheduler", "group"))
    }


def test_kill_minus_9_at_any_moment_of_a_save_leaves_a_checkpoint_that_loads(
    tiny_dir: Path, small: Path, tmp_path: Path
) -> None:
    roots = []
    for number, (moment, victim, iteration, _) in enumerate(KILLS):
        root = tmp_path / str(number)
        shutil.copytree(small, root)
        # The second time the only whole one is the one that was moved aside.
        for _ in range(2 if moment == "old one moved aside" else 1):
            with start_world(save_and_die, 2, tiny_dir, root, iteration, moment, victim) as world:
                assert world.wait()[victim] == -signal.SIGKILL, (moment, world.log(victim))
        assert (root / "latest").read_text() == "3\n"
        roots.append(root)
    # Loaded by the next run, which then saves the iteration that was interrupted.
    for iteration in (6, 3):
        chosen = [n for n, kill in enumerate(KILLS) if kill[2] == iteration]
        found = run_world(load_each, 2, tiny_dir, [roots[n] for n in chosen], iteration)
        assert found == [[KILLS[n][3] for n in chosen]] * 2
    for root, (_, _, iteration, _) in zip(roots, KILLS, strict=True):
        names = {path.name for path in root.iterdir()}
        assert names == {"latest", "iter_0000003", f"iter_{iteration:07d}"}


def test_a_first_save_that_is_killed_before_latest_is_found(tiny_dir: Path, tmp_path: Path) -> None:
    arguments = (tiny_dir, tmp_path / "root", 3, "directory named", 0)
    with start_world(save_and_die, 2, *arguments) as world:
        assert world.wait()[0] == -signal.SIGKILL
    assert (tmp_path / "root" / "iter_0000003").is_dir()
    assert not (tmp_path / "root" / "latest").exists()
    assert run_world(load_each, 2, tiny_dir, [tmp_path / "root"], None) == [[(3, 2)]] * 2


# --- refusals -------------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _edit(**changes: Any) -> Callable[[Path], None]:
    """Write a manifest with other values and a hash that fits, as another version or run would have."""

    def edit(path: Path) -> None:
        document = json.loads(path.read_text()) | changes
        document.pop("manifest_sha256")
        digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(document | {"manifest_sha256": digest}))

    return edit


CHECKPOINT = "iter_0000003"
DAMAGE: list[tuple[str, Callable[[Path], Any], str, str]] = [
    (f"{CHECKPOINT}/__0_0.distcp", _truncate, "__0_0.distcp", "bytes, the manifest says"),
    (f"{CHECKPOINT}/__1_0.distcp", _truncate, "__1_0.distcp", "bytes, the manifest says"),
    (f"{CHECKPOINT}/__1_0.distcp", _flip, "__1_0.distcp", "SHA-256 differs"),
    (f"{CHECKPOINT}/.metadata", _flip, ".metadata", "SHA-256 differs"),
    (f"{CHECKPOINT}/__1_0.distcp", Path.unlink, "__1_0.distcp", "is missing"),
    (f"{CHECKPOINT}/metadata.json", Path.unlink, "metadata.json", "is missing"),
    (f"{CHECKPOINT}/manifest.json", Path.unlink, "manifest.json", "interrupted"),
    (f"{CHECKPOINT}/manifest.json", _truncate, "manifest.json", "cannot be read"),
    (f"{CHECKPOINT}/manifest.json", lambda path: path.write_text("[]"), "manifest.json", "damaged"),
    (f"{CHECKPOINT}/manifest.json", _edit(format_version=0), "format version 0", "reads 1"),
    (f"{CHECKPOINT}/manifest.json", _edit(format_version=2), "format version 2", "reads 1"),
    ("latest", lambda path: path.write_text("soon\n"), "latest", "'soon'"),
    ("latest", lambda path: path.write_text("²\n"), "latest", "one iteration number"),
    ("latest", lambda path: path.write_bytes(b"\xff\xfe"), "latest", "one iteration number"),
    ("latest", lambda path: path.write_text("6\n"), "iter_0000006", "has no manifest.json"),
]

OTHER_RUNS: list[tuple[dict[str, Any], str, str]] = [
    ({"fingerprint": "other"}, "base.fingerprint", "'other'"),
    ({"adapter": SMALL | {"alpha": 8}}, "adapter.alpha", "has 4, this run has 8"),
    ({"adapter": SMALL | {"rank": 4}}, "adapter.rank", "has 2, this run has 4"),
    (
        {"adapter": SMALL | {"glm52_lora_scope": "routed_experts"}},
        "adapter.glm52_lora_scope",
        "all and this run has routed_experts",
    ),
    ({"adapter": ADAPTER}, "adapter.lora_target_modules", "lm_head"),
]


def refusals(model: Path, damaged: list[Path], good: Path) -> list[Any]:
    """Return ``(error, message, whether anything changed)`` of every load that has to be refused."""
    job = Job(model, SMALL, base=False, bf16=True)
    job.fill(5)
    tried = [(job, root) for root in damaged]
    for changes, _, _ in OTHER_RUNS:
        config = changes.get("adapter", SMALL)
        # A scope is in the factors themselves; whatever else differs is refused before they are looked at.
        narrower = "glm52_lora_scope" in config
        other = Job(model, config if narrower else SMALL, base=False, bf16=True)
        other.fingerprint = changes.get("fingerprint", other.fingerprint)
        other.adapter = AdapterConfig(**config)
        tried.append((other, good))
    tried.append((Job(model, SMALL, base=False), good))
    found = []
    for attempt, root in tried:
        before = attempt.state()
        try:
            attempt.load(root)
        except Exception as error:
            found.append((type(error).__name__, str(error), before != attempt.state()))
        else:
            found.append(("loaded", "", before != attempt.state()))
    # The control: the undamaged one loads, and that is a change.
    before = job.state()
    assert job.load(good) == 3
    assert job.state() != before
    return found


def test_damage_and_other_runs_are_refused_by_name_and_nothing_changes(
    tiny_dir: Path, small: Path, tmp_path: Path
) -> None:
    roots = []
    for number, (file, damage, _, _) in enumerate(DAMAGE):
        root = tmp_path / str(number)
        shutil.copytree(small, root)
        damage(root / file)
        roots.append(root)
    expected = [(name, detail) for _, _, name, detail in DAMAGE]
    expected += [(name, detail) for _, name, detail in OTHER_RUNS]
    expected.append(("bfloat16", "this run has float32"))
    for results in run_world(refusals, 2, tiny_dir, roots, small):
        assert len(results) == len(expected)
        for (kind, message, changed), (name, detail) in zip(results, expected, strict=True):
            assert (kind, changed) == ("CheckpointError", False), (name, detail, message)
            assert name in message
            assert detail in message
            assert "\n" not in message


# --- retention ------------------------------------------------------------------------------------------------------------


def save_many(model: Path, root: Path, keep_last: int | None) -> list[list[str]]:
    """Save iterations 1 to 4; return what stood in the root after each."""
    job = Job(model, SMALL, base=False, bf16=True)
    listed = []
    for iteration in range(1, 5):
        job.save(root, iteration, keep_last=keep_last)
        listed.append(sorted(path.name for path in root.glob("iter_*")))
    return listed


@pytest.mark.parametrize(("keep_last", "kept"), [(2, [3, 4]), (1, [4]), (None, [1, 2, 3, 4])])
def test_keep_last_keeps_the_newest_and_without_it_all_stay(
    tiny_dir: Path, tmp_path: Path, keep_last: int | None, kept: list[int]
) -> None:
    (listed,) = run_world(save_many, 1, tiny_dir, tmp_path, keep_last)
    assert listed[-1] == [f"iter_{iteration:07d}" for iteration in kept]
    assert all(f"iter_{n:07d}" in names for n, names in enumerate(listed, start=1))


def _save_a_poisoned_state(model_dir: Path, root: Path, rank: int) -> str:
    job = Job(model_dir, base=False)
    job.save(root, 1)
    if dist.get_rank() == rank:
        with torch.no_grad():
            next(p for p in job.model.parameters() if p.requires_grad).view(-1)[0] = float("nan")
    try:
        job.save(root, 2, keep_last=1)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.dist
def test_a_state_with_nan_is_refused_on_every_rank_and_the_last_good_checkpoint_stays(
    tiny_dir: Path, tmp_path: Path
) -> None:
    said = run_world(_save_a_poisoned_state, 2, tiny_dir, tmp_path, 0)
    assert said[0] == said[1] and "iteration 2 is not saved" in said[0] and "lora_A" in said[0]
    assert (tmp_path / LATEST).read_text() == "1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", LATEST]
