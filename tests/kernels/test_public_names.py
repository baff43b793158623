"""The names of lowtide.kernels: functions, loaded on first use; Triton only when a kernel is started."""

import subprocess
import sys

import pytest

import lowtide.kernels


def in_fresh_python(code: str) -> str:
    """What `code` prints in a Python process of its own, errors and log included."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


WITHOUT_TRITON = """
import logging, sys

class ExceptTriton:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *args):
        return None if name == "triton" else self._finder.find_spec(name, *args)

sys.meta_path[:] = [ExceptTriton(finder) for finder in sys.meta_path]
logging.basicConfig(format="%(levelname)s %(message)s")
"""


def test_the_public_names_exist() -> None:
    assert list(lowtide.kernels.__all__) == sorted(lowtide.kernels.__all__)
    assert set(lowtide.kernels.__all__) <= set(dir(lowtide.kernels))
    assert all(getattr(lowtide.kernels, name).__name__ == name for name in lowtide.kernels.__all__)


def test_an_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rmsnorm'; it has Fused, add_layer_norm"):
        _ = lowtide.kernels.rmsnorm  # type: ignore[attr-defined]  # it is refused


def test_importing_every_name_imports_no_triton_and_without_it_a_gpu_falls_back_with_one_line() -> None:
    """And a function is not hidden by its file."""
    code = f"""
import sys, lowtide.kernels
for name in lowtide.kernels.__all__:
    getattr(lowtide.kernels, name)
import lowtide.kernels.rms_norm
from lowtide.kernels.layer_norm import add_layer_norm
import lowtide.engine.build
names = ("rms_norm", "layer_norm", "cross_entropy", "linear_cross_entropy")
print(*{{type(getattr(lowtide.kernels, name)).__name__ for name in names}})
print([name for name in sys.modules if name.partition(".")[0] == "triton"])
{WITHOUT_TRITON}
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from lowtide.kernels import rms_norm, swiglu
with FakeTensorMode():
    x = torch.empty(2, 4, device="cuda")
    print(rms_norm(x, None).shape, swiglu(x, x).device.type)
try:
    rms_norm(torch.ones(2, 4), None, backend="triton")
except ValueError as error:
    print(error)
"""
    assert in_fresh_python(code).splitlines() == [
        "function",
        "[]",
        "WARNING triton is not installed: kernels run as eager torch operations, which are slower on a GPU",
        "torch.Size([2, 4]) cuda",
        'rms_norm: backend "triton" needs the package triton, which is not installed; use "auto"',
    ]


def test_the_package_alone_imports_no_torch() -> None:
    assert in_fresh_python("import sys, lowtide.kernels; print('torch' in sys.modules)") == "False"
