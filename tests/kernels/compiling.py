"""Compiles every launch of tests/kernels/launches for GPUs that are not here, and says what came out, as JSON lines.

    python -m tests.kernels.compiling [KERNEL ...]

The lines of `launching.py`, which are lists, follow. A process of its own, without Triton's interpreter: a jit function
is one or the other from its definition on.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_REGISTERS = 128


@dataclass(frozen=True)
class Compiled:
    """What a launch became on a target."""

    kernel: str  # file and function
    case: str
    dtype: str
    target: str
    registers: int  # a thread
    register_budget: int
    spilled_bytes: int  # a thread
    widest_load_bytes: int  # a thread and instruction
    must_be_vectorized: bool
    scalars: str  # how the kernel is made for its numbers


@dataclass(frozen=True)
class Code:
    registers: int
    spilled_bytes: int
    widest_load_bytes: int
    scalars: str = ""


def launch_names() -> list[str]:
    from tests.kernels import launches

    return sorted(module.name for module in pkgutil.iter_modules(launches.__path__))


def type_of(value: Any) -> str:
    """Triton's name for the type of an argument."""
    from triton.runtime.jit import mangle_type

    if isinstance(value, torch.Tensor):
        return str(mangle_type(value))
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def compile_launch(launch: Any, target: str) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    scalars: list[str] = []
    for index, param in enumerate(launch.kernel.params):
        value = launch.args.get(param.name, param.default)
        # As a call does: None and 1 become constants, and what is a multiple of 16 is known to be.
        is_special = type(value) is int and not param.do_not_specialize
        if param.is_constexpr or value is None or (is_special and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (is_special and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
        if not isinstance(value, torch.Tensor):
            scalars.append(f"{param.name}: {signature[param.name]} {attributes.get((index,), '')}")
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": launch.enable_fp_fusion,
    }
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    code = code_of_cuda(compiled.asm) if target.startswith("sm_") else code_of_amd(compiled.asm["amdgcn"])
    return replace(code, scalars=", ".join(scalars))


def code_of_cuda(asm: Any) -> Code:
    """From `cuobjdump`, which ships with Triton: registers and stack; from PTX: the widths of loads."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    widths = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"ld\.global[\w:.]*?(?:\.v(\d))?\.[bfus](\d+)", asm["ptx"])
    ]
    # Loads that a pipelined loop starts early go to shared memory; their last operands are the bytes copied and read.
    widths += [int(number, 0) for number in re.findall(r"cp\.async\.c[ag][\w.:]* [^;]*?\], (\w+)", asm["ptx"])]
    return Code(registers, stack + local, max(widths, default=0))


def code_of_amd(text: str) -> Code:
    """From the assembler's metadata, and the loads by their names."""
    registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
    spills = sum(map(int, re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", text)))
    loads = re.findall(r"(?:global|buffer)_load_(?:dwordx(\d)|dword\b|b(\d+))", text)
    widths = [4 * int(words) if words else int(bits) // 8 if bits else 4 for words, bits in loads]
    return Code(registers, 4 * spills, max(widths, default=0))


def compile_all(names: list[str]) -> None:
    """Compile each case in a dtype for a GPU of NVIDIA, both in turn; and the first of each kernel for AMD's."""
    from tests.kernels.recording import recorded_launches

    cuda = [target for target, (backend, *_) in TARGETS.items() if backend == "cuda"]
    for name in names:
        module = importlib.import_module(f"tests.kernels.launches.{name}")
        loose = getattr(module, "NOT_VECTORIZED", {})
        budgets = getattr(module, "REGISTERS", {})
        dtypes = getattr(module, "DTYPES", ACTIVATIONS)
        seen: set[str] = set()
        for number, (case, run) in enumerate(module.CASES.items()):
            # Turns of different lengths, or of the same with a shift: each dtype meets each GPU.
            dtype = dtypes[(number + number // len(cuda)) % len(dtypes)]
            with recorded_launches() as launches:
                run(dtype)
            assert launches, f"{name}: case '{case}' launches nothing"
            for launch in launches:
                function = launch.kernel.fn.__name__.strip("_")
                amd = ["gfx942"] if function not in seen else []
                seen.add(function)
                for target in [cuda[number % len(cuda)], *amd]:
                    code = compile_launch(launch, target)
                    compiled = Compiled(
                        f"{name}.{function}",
                        case,
                        str(dtype).removeprefix("torch."),
                        target,
                        code.registers,
                        budgets.get(case, DEFAULT_REGISTERS),
                        code.spilled_bytes,
                        code.widest_load_bytes,
                        case not in loose,
                        code.scalars,
                    )
                    print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    torch.set_num_threads(1)
    from tests.kernels.launching import main as start_launches

    compile_all(sys.argv[1:] or launch_names())
    start_launches()
