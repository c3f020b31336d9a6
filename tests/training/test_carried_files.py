"""Adapter files of a narrowed scope whose frozen factors contribute: in the file, said there, and nowhere without permission.

The oracle is the full-scope model that the values come from: whatever holds the same factors computes the same bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.adapter_import import import_adapter
from tests.training.test_adapter_io import WEIGHTS, content, fill, tokens
from tests.worlds import run_world

pytestmark = pytest.mark.dist

TARGETS = ["*.layers.1.mlp.experts.*", "*.layers.1.self_attn.o_proj", "lm_head"]
ALL = {"rank": 2, "alpha": 4, "lora_target_modules": TARGETS}
NARROW = ALL | {"glm52_lora_scope": "routed_experts"}
ALLOWED = NARROW | {"allow_nonzero_frozen": True}
FROZEN = ["model.layers.1.self_attn.o_proj", "lm_head"]


def models(base: Path, folder: Path, layout: dict[str, int]) -> dict[str, Any]:
    """Load a full-scope file into each kind of model and back; what each computes, or what it was told."""
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.layers.merge import merge_adapters
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.adapter_io import export_adapter, iter_adapter, load_adapter
    from megatron_xorl.training.model import forward_logits, load_model

    use_cpu()
    initialize(**layout)
    found: dict[str, Any] = {}

    def logits(model: torch.nn.Module) -> Any:
        with torch.no_grad():
            return forward_logits(model, tokens()).numpy()

    def bytes_of(model: torch.nn.Module) -> list[bytes]:
        return [p.detach().numpy().tobytes() for *_, p in named_factors(model).values()]

    def told(action: Callable[[], Any]) -> str:
        try:
            action()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    full = load_model(base, AdapterConfig(**ALL))
    fill(full)
    found["full"] = logits(full)
    export_adapter(full, folder / "full")
    allowed = load_model(base, AdapterConfig(**ALLOWED))
    load_adapter(allowed, folder / "full")
    found["allowed"] = logits(allowed)
    export_adapter(allowed, folder / "narrow")
    streamed = {key: value for key, value in iter_adapter(allowed) if value is not None}
    found["streamed"] = sorted(streamed)
    if layout:
        return found

    narrow = load_model(base, AdapterConfig(**NARROW))
    before = bytes_of(narrow)
    found["without permission"] = told(lambda: load_adapter(narrow, folder / "full"))
    found["changed"] = bytes_of(narrow) != before
    with torch.no_grad():
        named_factors(narrow)["lm_head.lora_B"][2].fill_(1)
    found["export without permission"] = told(lambda: export_adapter(narrow, folder / "refused"))
    dropped = load_model(base, AdapterConfig(**ALLOWED, frozen_factors="drop"))
    found["dropped"] = told(lambda: load_adapter(dropped, folder / "full"))

    bare = load_model(base)
    load_adapter(bare, folder / "narrow")
    found["bare"] = logits(bare)
    found["trains"] = sorted(
        {f.region for f, _, p in named_factors(bare).values() if p.requires_grad}
    )
    fill(full)
    load_adapter(full, folder / "narrow")
    found["widened"] = logits(full)
    merge_adapters(bare, requantize=True)
    found["merged"] = told(lambda: logits(bare))
    return found


@pytest.fixture(scope="module")
def made(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("carried")
    (folder / "ep2").mkdir()
    (found,) = run_world(models, 1, tiny_dir, folder, {})
    run_world(models, 2, tiny_dir, folder / "ep2", {"ep": 2})
    return folder, found


def test_whatever_holds_the_factors_computes_the_same_bits(
    made: tuple[Path, dict[str, Any]],
) -> None:
    _, found = made
    for name in ("allowed", "bare", "widened"):
        assert (found[name] == found["full"]).all(), name
    assert found["trains"] == ["routed_experts"]
    assert found["merged"] == "accepted"


def test_the_file_holds_what_contributes_and_says_what_did_not_train(
    made: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = made
    document = json.loads((folder / "narrow/adapter_config.json").read_text())["megatron_xorl"]
    assert document["frozen"] == FROZEN
    assert document["adapter"]["glm52_lora_scope"] == "routed_experts"
    assert document["adapter"]["allow_nonzero_frozen"] is True
    assert (
        "frozen"
        not in json.loads((folder / "full/adapter_config.json").read_text())["megatron_xorl"]
    )
    stored, full = load_file(folder / "narrow" / WEIGHTS), load_file(folder / "full" / WEIGHTS)
    assert found["streamed"] == sorted(stored)
    assert stored.keys() == full.keys()
    assert all(torch.equal(stored[key], full[key]) for key in full)
    file = AdapterFile(folder / "narrow")
    assert file.frozen == set(FROZEN)
    assert {factor.target for factor in file.factors if not factor.trainable} == set(FROZEN)
    assert content(folder / "ep2/narrow") == content(folder / "narrow")


def test_nothing_frozen_contributes_without_permission(made: tuple[Path, dict[str, Any]]) -> None:
    folder, found = made
    for name, count in (("without permission", 2), ("export without permission", 1)):
        assert found[name].startswith("AdapterError: ")
        assert f"has {count} targets that are frozen here and not zero, first " in found[name]
        assert "set allow_nonzero_frozen: true" in found[name]
    assert not found["changed"]
    assert not (folder / "refused").exists()
    assert "0 factors missing, 4 extra" in found["dropped"]


def test_a_conversion_keeps_what_is_frozen(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import_adapter(made[0] / "narrow", tmp_path / "there", "hf_peft")
    import_adapter(tmp_path / "there", tmp_path / "back")
    assert AdapterFile(tmp_path / "there").frozen == set(FROZEN)
    assert content(tmp_path / "back") == content(made[0] / "narrow")


def _listed(*names: object) -> Callable[[dict[str, Any]], Any]:
    return lambda own: own.update(frozen=list(names))


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (_listed("lm_hed"), r"lists 'lm_hed' under frozen, which is not in the file \(nearest: lm_head\)"),
    (_listed("model.layers.1.mlp.experts.up_proj"), "which the scope routed_experts trains"),
    (_listed(3), "lists 3 under frozen"),
    (lambda own: own.update(frozen="lm_head"), "frozen is 'lm_head', expected a list"),
    (lambda own: own["adapter"].update(allow_nonzero_frozen=False), "allow_nonzero_frozen is false"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_a_list_that_does_not_fit_the_file_is_refused(
    made: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    says: str,
) -> None:
    shutil.copytree(made[0] / "narrow", tmp_path / "a")
    path = tmp_path / "a/adapter_config.json"
    document = json.loads(path.read_text())
    change(document["megatron_xorl"])
    path.write_text(json.dumps(document))
    with pytest.raises(AdapterError, match=says) as caught:
        AdapterFile(tmp_path / "a")
    assert "\n" not in str(caught.value)
