"""Compiling every kernel for GPUs that are not here, and looking at what came out.

One idea: Triton's compiler, ptxas and the disassembler need no device, so what can go wrong before the first run on one is found
on a laptop. The variants are what the wrappers launch for GLM-5.2's own shapes (:mod:`megatron_xorl.kernels.shapes`, recorded on
``meta`` tensors); each must

* compile, for Hopper (sm_90) and Blackwell (sm_100);
* hold its matrix instruction: ``QGMMA`` or ``UTCQMMA`` for fp8, ``HGMMA`` or ``UTCHMMA`` for bf16 (what Triton falls back to is
  slow and silent);
* spill nothing: no load from or store to local memory;
* fit the shared memory of a block, 232,448 bytes;
* be code: a variant can compile to a lone ``trap``.

``golden.json`` keeps the table as it is with the Triton version it names, registers included; a test compares. Results are cached
by (kernel sources, Triton version, target) under ``MEGATRON_XORL_CACHE`` or ``~/.cache/megatron_xorl``.

    python -m megatron_xorl.kernels.aot               print the table, exit 1 if a gate fails
    python -m megatron_xorl.kernels.aot --write       and write golden.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_xorl.kernels.launch import Launch, recording
from megatron_xorl.kernels.shapes import cases
from megatron_xorl.kernels.subjects import subjects

__all__ = [
    "GOLDEN",
    "SHARED_LIMIT",
    "TARGETS",
    "Report",
    "compile_all",
    "compile_one",
    "faults",
    "format_table",
    "variants",
]

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.json"
TARGETS = (90, 100)
SHARED_LIMIT = 232_448
"""Bytes of shared memory a block can have on both targets (CUDA programming guide, technical specifications: 227 KiB)."""

OPCODES = {("fp8", 90): "QGMMA", ("fp8", 100): "UTCQMMA", ("bf16", 90): "HGMMA", ("bf16", 100): "UTCHMMA"}  # fmt: skip
# What each kernel multiplies; one that is not here cannot be judged, and fails.
PRODUCTS = {
    "grouped_dx._kernel": "bf16",
    "grouped_linear._kernel": "fp8",
    "head_matmul._kernel": "bf16",
    "indexer_backward._kernel": "bf16",
    "indexer_kl._kernel": None,
    "indexer_logits._kernel": "fp8",
    "linear._kernel": "fp8",
    "linear_dx._kernel": "bf16",
    "lora_gradient._kernel": "bf16",
    "lora_shrink._kernel": "bf16",
    "quantize_blocks._kernel": None,
    "quantize_rows._kernel": None,
    "segment_sum._kernel": None,
    "sparse_mla._kernel": "bf16",
    "sparse_mla_backward._key_gradient": "bf16",
    "sparse_mla_backward._query_gradient": "bf16",
    "sparse_mla_backward._slopes": "bf16",
    "sparse_mla_probs._kernel": "bf16",
    "topk._kernel": None,
}
_POINTERS = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Report:
    """One variant for one target; ``mma`` counts the expected matrix instruction, ``local`` loads and stores of local memory."""

    variant: str
    target: int
    opcode: str | None
    mma: int
    registers: int
    shared: int
    local: int
    trap: bool


def variants() -> dict[str, Launch]:
    """Every distinct launch of GLM-5.2's shapes by ``kernel[constexprs]``, nothing computed."""
    known = subjects()
    found: dict[str, Launch] = {}
    for case in cases("full"):
        subject = known[case.kernel]
        with recording() as launches:
            subject.run(subject.make(case.dims, "meta"), subject.dtypes[0])
        for one in launches:
            found.setdefault(_name(one), one)
    return dict(sorted(found.items()))


def _kernel_name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def _name(one: Launch) -> str:
    settings = ",".join(f"{name}={int(value)}" for name, value in one.config.items())
    return f"{_kernel_name(one.kernel)}[{settings}]"


def _signature(one: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and alignment of a launch's arguments, by the rules of Triton's own specialisation."""
    kernel = one.kernel
    constants = {name: value for name, value in one.config.items() if name not in _OPTIONS}
    types, aligned = {}, {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, one.args, strict=False)):
        if isinstance(value, torch.Tensor):
            types[name] = _POINTERS[value.dtype]
            aligned[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                aligned[(place,)] = [["tt.divisibility", 16]]
    types |= dict.fromkeys(constants, "constexpr")
    return {name: types[name] for name in kernel.arg_names}, constants, aligned


def compile_one(name: str, one: Launch, target: int) -> Report:
    """Compile a launch for ``sm_<target>`` and read the result."""
    types, constants, aligned = _signature(one)
    places = {(one.kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=one.kernel, signature=types, constexprs=places, attrs=aligned)
    options = {option: one.config[option] for option in _OPTIONS}
    built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    usage, code = _disassemble(built.asm["cubin"])
    product = PRODUCTS[_kernel_name(one.kernel)]
    opcode = OPCODES[product, target] if product else None
    count = {word: len(re.findall(rf"\b{word}\b", code)) for word in ("LDL", "STL", opcode or "-")}
    registers = re.search(r"REG:(\d+)", usage)
    return Report(
        variant=name,
        target=target,
        opcode=opcode,
        mma=count[opcode] if opcode else 0,
        registers=int(registers[1]) if registers else 0,
        shared=built.metadata.shared,
        local=count["LDL"] + count["STL"],
        trap=is_lone_trap(built.asm["ptx"]),
    )


def is_lone_trap(ptx: str) -> bool:
    """Whether a kernel's body does nothing but trap: no store, no atomic."""
    return "trap;" in ptx and not re.search(r"\b(st|red|atom)\.", ptx)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code of a cubin, by the tool that comes in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return usage, code


def faults(report: Report) -> list[str]:
    """What is wrong with a compiled variant; empty if every gate is passed."""
    found = []
    if report.trap:
        found.append("compiled to a lone trap")
    if report.opcode and report.mma == 0:
        found.append(f"has no {report.opcode}")
    if report.local:
        found.append(f"touches local memory {report.local} times: registers are spilled")
    if report.shared > SHARED_LIMIT:
        found.append(f"wants {report.shared} bytes of shared memory, a block has {SHARED_LIMIT}")
    return found


def compile_all(targets: tuple[int, ...] = TARGETS) -> list[Report]:
    """Compile every variant for every target, or take the results of the same sources and Triton from the cache.

    Raises:
        RuntimeError: the process interprets kernels (``TRITON_INTERPRET``), so it cannot compile them.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "TRITON_INTERPRET=1: kernels are interpreted in this process; unset it to compile"
        )
    found: list[Report] = []
    for target in targets:
        cache = _cache_file(target)
        if not cache.exists():
            reports = [compile_one(name, one, target) for name, one in variants().items()]
            cache.parent.mkdir(parents=True, exist_ok=True)
            partial = cache.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps([asdict(one) for one in reports]), encoding="utf-8")
            partial.replace(cache)
        found += [Report(**one) for one in json.loads(cache.read_text(encoding="utf-8"))]
    return found


def _cache_file(target: int) -> Path:
    digest = hashlib.sha256()
    for file in sorted(HERE.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    root = os.environ.get("MEGATRON_XORL_CACHE") or Path.home() / ".cache" / "megatron_xorl"
    name = f"{digest.hexdigest()[:16]}-triton{triton.__version__}-sm{target}.json"
    return Path(root) / "kernels" / name


def format_table(reports: list[Report]) -> str:
    """The reports as aligned text, one variant and target a line, gates first."""
    rows = [("gate", "sm", "instruction", "regs", "shared", "local", "kernel")]
    for one in reports:
        instruction = f"{one.opcode} {one.mma}" if one.opcode else "-"
        verdict = "; ".join(faults(one)) or "ok"
        numbers = (str(one.registers), str(one.shared), str(one.local))
        rows.append((verdict, str(one.target), instruction, *numbers, one.variant))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Print the table; 1 if a gate fails."""
    parser = argparse.ArgumentParser(description="Compile every kernel without a GPU.")
    parser.add_argument("--write", action="store_true", help="write golden.json")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    asked = parser.parse_args()
    reports = compile_all()
    document = {"triton": triton.__version__, "reports": [asdict(one) for one in reports]}
    if asked.write:
        lines = ",\n".join(json.dumps(one) for one in document["reports"])
        head = f'{{"triton": {json.dumps(triton.__version__)}, "reports": [\n'
        GOLDEN.write_text(f"{head}{lines}\n]}}\n", encoding="utf-8")
    print(json.dumps(document) if asked.json else format_table(reports))
    return int(any(faults(one) for one in reports))


if __name__ == "__main__":
    raise SystemExit(main())
