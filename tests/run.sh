#!/usr/bin/env bash
# The tests: set-up, then pytest.
#
#     bash tests/run.sh                    the default suite
#     bash tests/run.sh --all              lint and types first, then everything that needs no GPU
#     bash tests/run.sh tests/config -x    other arguments go to pytest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh

select="not slow and not layouts and not te and not gpu"
all=0
arguments=()
for argument in "$@"; do
    if [[ "$argument" == --all ]]; then all=1; else arguments+=("$argument"); fi
done

if ((all)); then
    select="not gpu"
    ruff check .
    mypy
fi

# One thread a process: distributed tests start several at once, and results must not depend on the number of cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest -q -m "$select" "${arguments[@]+"${arguments[@]}"}"
