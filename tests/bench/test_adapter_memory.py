"""The memory of a streaming export at GLM-5.2's real bank size: one bank and 1 GiB, whatever the number of layers."""

from __future__ import annotations

import pytest

from megatron_xorl.adapters.formats import FORMATS
from tests.bench.adapter_memory import measured

GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["files", "live"])
def test_an_export_holds_one_bank_at_most_and_a_gibibyte(kind: str, format: str) -> None:
    found = measured(kind, format, 3)
    assert found["bank"] == 2 * 64 * 3 * (
        256 * 2048 + 6144
    )  # bytes of bf16, rank, three pairs, both sides
    assert found["above"] <= found["bank"] + GIB
    # The whole file is larger than what may be held, so that a writer that collects it fails.
    assert found["file"] >= 3 * found["bank"]


@pytest.mark.slow
def test_more_layers_take_no_more_memory() -> None:
    """The negative control of the bound above, whose gibibyte would hide a file of a few layers."""
    two, four = (measured("files", "sglang_shared_outer", layers) for layers in (2, 4))
    assert four["file"] == 2 * two["file"]
    assert four["above"] < two["above"] + two["bank"] / 2
