"""What an adapter configuration may ask for today.

The configuration language is complete from the start, so that a file does not change when a feature arrives; until then the
setting is refused. It is never ignored: an indexer loss that is silently off trains something else than asked.
"""

from __future__ import annotations

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError

__all__ = ["check_available"]


def check_available(adapter: AdapterConfig) -> None:
    """Refuse settings that are understood and not built yet.

    Raises:
        AdapterError: lists each such setting, its value and the value to use.
    """
    faults = []
    if adapter.indexer != "frozen":
        faults.append(f"indexer is {adapter.indexer}; set indexer: frozen")
    if faults:
        raise AdapterError(f"these adapter settings are not available yet: {'; '.join(faults)}")
