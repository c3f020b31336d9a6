#!/usr/bin/env bash
# Kills a training run 60 times, in training and in saving, and looks each time at what is left.
#
#     bash tests/soak.sh                 60 kills, 3 of them under torchrun
#     bash tests/soak.sh --seed 7        other moments; --kills 6 --torchrun 0 for fewer
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -W ignore -m tests.soak "$@"
