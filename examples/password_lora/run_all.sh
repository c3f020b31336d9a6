#!/usr/bin/env bash
# Everything about passwords: eight adapters with one pair each, three pairs in one adapter, and the table of the scopes.
#
#     bash examples/password_lora/run_all.sh                  all of it
#     bash examples/password_lora/run_all.sh eight            one part: eight, three or scopes
#     bash examples/password_lora/run_all.sh --dry-run        check every run, print it as a command, write nothing
#
# Its folder is runs/password_lora/all. Nothing in it is removed, and a finished adapter is not trained again.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup.sh

# The CPU default everywhere, so that everybody sees the same numbers; a GPU that is here stays idle.
export CUDA_VISIBLE_DEVICES=
# One thread a process: several run at once, and sums must not depend on the number of cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python examples/password_lora/run_all.py "$@"
