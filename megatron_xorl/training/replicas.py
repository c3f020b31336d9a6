"""Do ranks that hold the same factor hold the same bytes? Compared by hash, every factor, across every axis that copies it.

    from megatron_xorl.training.replicas import check_replicas
    check_replicas(model)          # or the chunks of a pipeline stage; collective

The one idea: a rank says of each factor which part of its full shape it holds and the hash of its bytes; whoever names the same
part must have the same hash. So nothing here knows who reduces what, and a mistake in ``parallel.ownership`` (a shared factor
left out of a sum over ranks) is found as soon as an update has made copies differ, whichever axis it is on. A factor that every
rank sums twice alike leaves equal copies: that is for the comparison with one process.

Ranks of one stage exchange 16 bytes a factor. With ``--check-replicas N`` (``parallel.check_replicas`` of a run) every launched
run does this after each N-th step, before a checkpoint of that step, and stops if copies differ: nothing of it is saved.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_xorl.errors import ReplicaError
from megatron_xorl.layers.attach import named_factors
from megatron_xorl.layers.gathered import gather_now

__all__ = ["check_replicas", "differing_replicas", "refuse_differing"]

SHOWN = 5


def check_replicas(models: nn.Module | Iterable[nn.Module], when: str = "") -> None:
    """Return if all copies of every factor are equal to the bit; collective over all ranks.

    Args:
        models: a model, or the chunks of this rank's pipeline stage, not in the middle of an update.
        when: words for the message, such as ``"after iteration 40"``.

    Raises:
        ReplicaError: on every rank, naming the factors and the ranks that differ.
    """
    found = differing_replicas(models)
    everywhere: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    refuse_differing(
        {name: says for part in everywhere for name, says in (part or {}).items()}, when
    )


def refuse_differing(faults: dict[str, str], when: str = "") -> None:
    """Return if ``faults``, of all stages, is empty.

    Raises:
        ReplicaError: naming the first of them.
    """
    if not faults:
        return
    shown = "; ".join(f"{name}: {says}" for name, says in list(faults.items())[:SHOWN])
    raise ReplicaError(
        f"{when + ': ' if when else ''}copies of {len(faults)} factor{'s' if len(faults) > 1 else ''} differ between ranks, "
        f"expected the same bytes: {shown}{'; ...' if len(faults) > SHOWN else ''}; this state is not saved: resume from the "
        "last checkpoint, and compare with the owners that megatron-xorl targets CONFIG --ownership prints"
    )


def differing_replicas(models: nn.Module | Iterable[nn.Module]) -> dict[str, str]:
    """Return ``{factor: which global ranks differ}`` of this pipeline stage; collective over the stage's ranks."""
    chunks = [models] if isinstance(models, nn.Module) else list(models)
    gather_now(chunks)
    factors = named_factors(chunks)
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if not factors or group.size() == 1:  # every rank of a stage has the same factors
        return {}
    names = list(factors)
    rows = [[_number(repr(piece.ranges).encode()), _hash(param)] for _, piece, param in factors.values()]  # fmt: skip
    device = next(iter(factors.values()))[2].device
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    parts, hashes = torch.stack(theirs).cpu().unbind(-1)  # [ranks, factors] each
    ranks = dist.get_process_group_ranks(group)
    return {
        name: says
        for index, name in enumerate(names)
        if (says := _disagreement(ranks, parts[:, index], hashes[:, index]))
    }


def _disagreement(ranks: list[int], parts: Tensor, hashes: Tensor) -> str:
    """Words for the ranks that hold another hash than most holders of their part; empty if none does."""
    held = list(zip(ranks, parts.tolist(), hashes.tolist(), strict=True))
    words = []
    for part in dict.fromkeys(parts.tolist()):
        copies = [(rank, value) for rank, where, value in held if where == part]
        kinds = Counter(value for _, value in copies)
        if len(kinds) == 1:
            continue
        (most, count), *others = kinds.most_common()
        alike = [[rank for rank, value in copies if value == kind] for kind in kinds]
        if count > others[0][1]:
            odd = [rank for rank, value in copies if value != most]
            words.append(f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {count} others")
        else:
            words.append(" against ".join(_ranks(group) for group in alike))
    return " and ".join(words)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _hash(tensor: Tensor) -> int:
    """64 bits of the hash of a tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return _number(flat.cpu().numpy().data)


def _number(content: bytes | memoryview) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
