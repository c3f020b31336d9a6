#!/usr/bin/env bash
# The quick start: set-up, then the main job of examples/password_lora on two CPU processes, start to finish.
#
#     bash examples/quickstart.sh
#
# Its folder is runs/quickstart, emptied at every start; one without the quick start's mark, a file .quickstart, is refused.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh

# The CPU default everywhere, so that everybody sees the same job; a GPU that is here stays idle.
export CUDA_VISIBLE_DEVICES=
# One thread a process: the job has two, and sums must not depend on the number of cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python examples/password_lora/quickstart.py "$@"
