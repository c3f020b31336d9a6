"""The words for parts of the model that train: regions and scopes.

The one idea: a region is where a projection sits, a scope is a set of regions. A scope chooses
which factors train, never which modules are adapted, so that every scope runs the same forward
pass.
"""

from __future__ import annotations

__all__ = ["REGIONS", "SCOPES"]

REGIONS: tuple[str, ...] = ("attention", "dense_mlp", "shared_experts", "routed_experts", "lm_head")

SCOPES: dict[str, tuple[str, ...]] = {
    "all": REGIONS,
    "moe": ("shared_experts", "routed_experts"),
    "shared_experts": ("shared_experts",),
    "routed_experts": ("routed_experts",),
}
