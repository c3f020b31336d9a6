"""Which regions a scope trains.

The tables live in the config room, which needs the same words to check a YAML file; here is the one
question asked of them.
"""

from __future__ import annotations

from megatron_xorl.config.regions import REGIONS, SCOPES
from megatron_xorl.errors import ConfigError, nearest

__all__ = ["REGIONS", "SCOPES", "scope_regions"]


def scope_regions(scope: str) -> tuple[str, ...]:
    """Return the regions whose factors train under ``scope``.

    Raises:
        ConfigError: there is no such scope.
    """
    if scope not in SCOPES:
        close = nearest(scope, SCOPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"glm52_lora_scope is {scope!r}, expected one of {', '.join(SCOPES)}{hint}"
        )
    return SCOPES[scope]
