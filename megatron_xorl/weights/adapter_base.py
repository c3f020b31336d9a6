"""Whether an adapter file fits a base model: every target exists there and has the shapes of the file."""

from __future__ import annotations

from megatron_xorl.adapters.carried import stored_factors
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.projections import projections
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import AdapterError, nearest
from megatron_xorl.weights.adapter_files import AdapterFile

__all__ = ["check_fits"]


def check_fits(file: AdapterFile, config: GlmConfig) -> None:
    """Compare a file with the model of ``config``.

    Raises:
        AdapterError: a target does not exist or has other shapes, or a file of this package lacks what its own record promises.
    """
    known = {projection.name for projection in projections(config)}
    for factor in file.factors:
        if factor.target not in known:
            close = nearest(factor.target, known, n=1)
            hint = f" (nearest: {close[0]})" if close else ""
            raise AdapterError(
                f"{file.directory} adapts {factor.target}, which the base does not have{hint}; it is of another base"
            )
    recorded = build_inventory(config, file.adapter)
    file.check_factors(stored_factors(recorded, file.frozen))
    for factor in file.factors:
        wanted = recorded.by_name[factor.name]
        if factor.shape != wanted.shape:
            raise AdapterError(
                f"{file.directory}: {factor.name} is {list(factor.shape)}, the base needs {list(wanted.shape)}; "
                "it is of another base or rank"
            )
