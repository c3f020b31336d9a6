"""The page that is printed by the code is the page in docs/."""

from __future__ import annotations

from pathlib import Path

from megatron_xorl.adapters.topology import topology_page

PAGE = Path(__file__).resolve().parents[2] / "docs/projection-topology.md"


def test_the_page_is_what_the_code_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == topology_page(), (
        "run python -m megatron_xorl.adapters.topology > docs/projection-topology.md"
    )
