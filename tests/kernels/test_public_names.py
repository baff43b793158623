"""The names of lowtide.kernels: functions, loaded on first use; Triton only when a kernel is started."""

import importlib
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide.kernels
from tests.kit.ranks import in_a_new_process
from tests.kit.training import logged, refusal
from tests.test_public_api import in_fresh_python


def test_the_public_names_exist() -> None:
    assert list(lowtide.kernels.__all__) == sorted(lowtide.kernels.__all__)
    assert set(lowtide.kernels.__all__) <= set(dir(lowtide.kernels))
    assert all(getattr(lowtide.kernels, name).__name__ == name for name in lowtide.kernels.__all__)


def test_an_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rmsnorm'; it has Fused, add_rms_norm"):
        _ = lowtide.kernels.rmsnorm  # type: ignore[attr-defined]  # it is refused


def test_a_function_is_not_hidden_by_its_file() -> None:
    for name in ("cross_entropy", "linear_cross_entropy"):
        module = importlib.import_module(f"lowtide.kernels.{name}")
        assert getattr(lowtide.kernels, name) is getattr(module, name)


class ExceptTriton:
    """A finder that does not find it."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *args: Any) -> Any:
        return None if name == "triton" else self._finder.find_spec(name, *args)


def on_a_gpu() -> list[str]:
    """What is said of it, and the shape and the device of what two kernels give on it."""
    with logged() as said, FakeTensorMode():
        x = torch.empty(2, 4, device="cuda")
        found = f"{lowtide.kernels.rms_norm(x, None).shape} {lowtide.kernels.swiglu(x, x).device.type}"
        return [*said, found]


def without_triton() -> list[str]:
    """And an error."""
    sys.meta_path[:] = [ExceptTriton(finder) for finder in sys.meta_path]
    sys.modules.pop("triton", None)
    return [*on_a_gpu(), refusal(lowtide.kernels.rms_norm, torch.ones(2, 4), None, backend="triton")]


def test_without_triton_a_gpu_falls_back_with_one_line() -> None:
    """That importing every name does not import it is in tests/test_public_api.py."""
    assert in_a_new_process(without_triton) == [
        "triton is not installed: kernels run as eager torch operations, which are slower on a GPU",
        "torch.Size([2, 4]) cuda",
        'rms_norm: backend "triton" needs the package triton; install it, or use "auto"',
    ]


class WithoutCompiler:
    """Triton's drivers where it cannot build the library of a driver."""

    @property
    def active(self) -> Any:
        raise RuntimeError("Failed to find C compiler.")


def with_broken_triton() -> list[str]:
    with patch.object(importlib.import_module("triton.runtime.driver"), "driver", WithoutCompiler()):
        return on_a_gpu()


def test_without_a_compiler_a_gpu_falls_back_with_one_line() -> None:
    """Triton is installed, and builds a library before its first kernel."""
    assert in_a_new_process(with_broken_triton) == [
        "triton cannot start kernels, it needs a C compiler and Python's headers, python3-dev (Failed to find C "
        "compiler.): kernels run as eager torch operations, which are slower on a GPU",
        "torch.Size([2, 4]) cuda",
    ]


def test_the_package_alone_imports_no_torch() -> None:
    assert in_fresh_python("import sys, lowtide.kernels; print('torch' in sys.modules)") == "False"
