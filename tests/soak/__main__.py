"""``python -m tests.soak``: 60 kills, a summary line, exit 1 when anything was lost or corrupted."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from megatron_xorl.convert.tiny import make_tiny
from tests.soak.soak import soak


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="tests/soak.sh", description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--torchrun", type=int, default=3, help="of the kills, under torchrun")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same kills")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        make_tiny(Path(folder) / "model")
        tally = soak(
            given.kills, Path(folder) / "model", Path(folder), given.seed, given.torchrun
        )
    print(tally)
    return 1 if tally.lost or tally.corrupt else 0


if __name__ == "__main__":
    sys.exit(main())
