"""The C++ kernel and torch's chunked kernels behind `update_runs` do the same; the log says which of them works."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.optimizer_states import stored_states
from lowtide.kernels.optimizer_step import CHUNK_NUMEL, cpu_kernel, update_runs, update_shard
from tests.kernels.cpu_kernel import CASES, STATE_DTYPES, Shard, needs_compiler, start_values
from tests.kit.grids import pairs

Tier = Callable[[str], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    """`choose("torch")` sets the tier of this process until the test ends."""

    def to(tier: str) -> None:
        monkeypatch.setenv("LOWTIDE_CPU_KERNEL", tier)
        cpu_kernel.cache_clear()

    yield to
    cpu_kernel.cache_clear()


def trained(
    name: str, state_dtype: torch.dtype, weight: Tensor, gradients: list[Tensor], changes: dict[str, Any] | None = None
) -> Shard:
    """Steps with two stretches of options each, the second without decay."""
    rule, options = CASES[name]
    options = options | (changes or {})
    shard = Shard(rule, options, weight, state_dtype, torch.bfloat16)
    runs = [(weight.numel() // 48 * 16, options), (weight.numel(), options | {"weight_decay": 0.0})]
    for step, gradient in enumerate(gradients, start=1):
        states = list(shard.states.values())
        update_runs(rule, shard.master, gradient.clone(), states, step, runs, 0.5, shard.out)
    return shard


@needs_compiler
@pytest.mark.parametrize(
    ("name", "state_dtype", "changes"),
    pairs(list(CASES), STATE_DTYPES, ({}, {"betas": (0.3, 0.4)}, {"weight_decay": 0.0})),
    ids=str,
)
def test_the_tiers_agree(choose: Tier, name: str, state_dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Bitwise where torch computes in vectors with fused multiply-adds; it has other code for a rest."""
    weight, gradients = start_values(CHUNK_NUMEL + 3 * 1024)
    choose("native")
    found = trained(name, state_dtype, weight, gradients, changes)
    choose("torch")
    expected = trained(name, state_dtype, weight, gradients, changes)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        for kind, tensor in expected.tensors().items():
            assert torch.equal(found.tensors()[kind], tensor), kind
    else:
        torch.testing.assert_close(found.master, expected.master, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_the_torch_tier_may_be_cut_at_blocks(choose: Tier, state_dtype: torch.dtype) -> None:
    choose("torch")
    rule, options = CASES["adamw"]
    weight, gradients = start_values(5000)
    whole, pieces = (Shard(rule, options, weight, state_dtype, torch.float16) for _ in range(2))
    for step, gradient in enumerate(gradients, start=1):
        update_shard(rule, whole.master, gradient.clone(), list(whole.states.values()), step, options, 1.0, whole.out)
        for start, end in ((0, 1024), (1024, 3072), (3072, 5000)):
            part = slice(start, end)
            states = [state.part(start, end) for state in stored_states(list(pieces.states.values()))]
            tensors = [t for state in states for t in (state.payload, state.scale) if t is not None]
            out = None if pieces.out is None else pieces.out[part]
            update_shard(rule, pieces.master[part], gradient[part].clone(), tensors, step, options, 1.0, out)
    for name, tensor in whole.tensors().items():
        assert torch.equal(pieces.tensors()[name], tensor), name


@needs_compiler
def test_the_log_names_the_kernel_once(choose: Tier, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    weight, gradients = start_values(100)
    choose("native")
    trained("adamw", torch.float32, weight, gradients)
    assert [record.getMessage() for record in caplog.records] == [
        "CPU optimizer: a C++ pass per shard, with all instructions of this processor"
    ]
    choose("portable")
    trained("adamw", torch.float32, weight, gradients)
    assert caplog.records[-1].getMessage() == "CPU optimizer: a C++ pass per shard, with portable instructions"
    choose("torch")
    trained("adamw", torch.float32, weight, gradients)
    assert caplog.records[-1].getMessage() == (
        "CPU optimizer: torch's kernels, chunk by chunk, because LOWTIDE_CPU_KERNEL is torch"
    )
    assert len(caplog.records) == 3


def test_an_unknown_tier_is_refused(choose: Tier) -> None:
    choose("fast")
    with pytest.raises(ValueError, match="LOWTIDE_CPU_KERNEL: expected native, portable or torch, found 'fast'"):
        cpu_kernel()
