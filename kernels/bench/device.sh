#!/usr/bin/env bash
# Every kernel on one Hopper or Blackwell GPU: correctness, then time. Builds and installs nothing.
#
#     bash kernels/bench/device.sh --out kernels.json     needs torch >= 2.11 with Triton >= 3.6; about 8 minutes
#     bash kernels/bench/device.sh --dry-run              every case in the CPU interpreter, small shapes
#
# The kernels import only torch and triton: a folder that holds nothing but a link to them stands for the package, so neither
# Megatron-core nor an installed megatron_xorl is needed. PYTHON chooses the interpreter.
set -euo pipefail

kernels="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
alone="$(mktemp -d)"
trap 'rm -rf "$alone"' EXIT
mkdir "$alone/megatron_xorl"
touch "$alone/megatron_xorl/__init__.py"
ln -s "$kernels" "$alone/megatron_xorl/kernels"

# -P keeps the current folder off the path: in the repository, its package would hide the link.
run=("${PYTHON:-python3}" -P)
module=megatron_xorl.kernels.bench.device
for argument in "$@"; do
    if [[ "$argument" == --dry-run ]]; then
        export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        # Triton's interpreter is wrong for bf16 as it comes; the tests' layer corrects it and watches memory.
        layer="from tests.kernels import interpreter, sanitizer; interpreter.install(); sanitizer.install()"
        PYTHONPATH="$alone:$kernels/.." "${run[@]}" -c \
            "$layer; import runpy; runpy.run_module('$module', run_name='__main__')" "$@"
        exit
    fi
done

PYTHONPATH="$alone" "${run[@]}" -m "$module" "$@"
