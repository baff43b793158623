"""Fixtures of the kernels' tests."""

import pytest

from lowtide.kernels.cpu_optimizer import CpuKernel


@pytest.fixture(scope="session")
def kernel() -> CpuKernel:
    """The C++ optimizer step with all instructions of this processor."""
    return CpuKernel()
