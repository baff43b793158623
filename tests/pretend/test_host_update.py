"""The update on the host of what is on the device: sums that leave in order, backwards that add up, and its errors.

That it gives the bits of an update on the device is asked in `test_host_waits.py`, and which bytes it takes in
`test_memory.py`.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import lowtide
from lowtide.offload import HostCopies, HostPool, OffloadError
from lowtide.zero.host_update import MAX_LEAVING, HostSum, HostUpdate
from lowtide.zero.optimizer import ShardedOptimizer
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import on_device
from tests.kit.training import ADAMW, refusal, settings


def config_of(stage: int, more: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """With states in host memory. more: of their section."""
    zero = {"offload_optimizer": {"device": "cpu", **(more or {})}}
    return settings(stage, device="auto", zero_optimization=zero, **sections)


@on_device()
def test_sums_come_back_in_order_and_at_most_two_gradients_are_on_their_way() -> None:
    device = torch.device("pretend", 0)
    pool = HostPool(pinned=True)
    host = HostUpdate(HostCopies(device), pool)
    sums = [HostSum(host, partial(torch.empty, 1024, device=device)) for _ in range(5)]
    for backward in range(3):
        for index, one in enumerate(sums):
            memory = one.open()
            assert list(host._gradients._coming) == [each._resident for each in sums[index + 1 : index + 2] if backward]
            memory.fill_(float(index)) if not backward else memory.add_(1.0)
            one.leave()
            assert len(host._gradients._leaving) <= MAX_LEAVING
    for index, one in enumerate(sums):
        total = one.total
        one.drop()  # which waits for the copy into the memory that it gives back
        assert total is not None and bool((total == index + 2).all())
    assert pool.bytes_in_use == 0
    host.close()


@on_device()
def test_two_backwards_before_a_step_add_up() -> None:
    """Each of two losses has its own backward, at the boundary."""
    overlaps: list[dict[str, Any]] = [{}, {"overlap": "delayed", "delay_after_steps": 0}]
    for more, stage in product(overlaps, (0, 2, 3)):
        config = config_of(stage, more, train_micro_batch_size_per_gpu=1)
        with lowtide.initialize(nn.Linear(3, 1, bias=False), config) as engine:
            for inputs in torch.tensor([[[1.0, 0, 0]], [[0, 10.0, 0]]]):
                engine.backward(engine(inputs.to(engine.device)).sum())
            assert engine.step().grad_norm.item() == pytest.approx(101**0.5)


@on_device()
def test_an_update_that_failed_is_told_where_its_parameters_are_used() -> None:
    with lowtide.initialize(mlp(), config_of(3)) as engine:
        with patch.object(ShardedOptimizer, "_change", side_effect=RuntimeError("the disk")):
            engine.train_step(vector_batch(0, 2))
            assert engine.optimizer.thread.wait() is not None
        for action in (lambda: engine.train_step(vector_batch(1, 2)), engine.state_dict):
            text = refusal(action, kind=OffloadError)
            assert text.startswith("update 1 of '") and "' on the host failed: the disk. " in text
            assert "continue from a checkpoint (engine.load_checkpoint)" in text


@on_device()
def test_a_caller_s_own_optimizer_stays_on_the_device() -> None:
    text = refusal(lowtide.initialize, mlp(), config_of(0, optimizer=None), optimizer=torch.optim.RMSprop)
    assert 'offload_optimizer.device: "cpu" needs an optimizer of the config' in text and text.endswith('set "none"')


# -- who pins memory, and who asks an accelerator for anything --------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "section", "pins"),
    [
        ("auto", {"device": "cpu"}, True),
        ("auto", {"device": "cpu", "pin_memory": False}, False),
        ("cpu", {"device": "cpu"}, False),
    ],
)
@on_device()
def test_memory_is_pinned_for_an_accelerator_that_trains(device: str, section: dict[str, Any], pins: bool) -> None:
    pinned = []
    make = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        memory = make(*shape, **options)
        if memory.is_pinned():
            pinned.append(memory.nbytes)
        return memory

    zero = {"stage": 3, "offload_optimizer": section, "offload_param": section}
    activations = {"offload": {"device": "cpu", "min_bytes": 1}} if section.get("pin_memory", True) else {}
    config = {"device": device, "optimizer": ADAMW, "zero_optimization": zero, "activation_checkpointing": activations}
    with patch.object(torch, "empty", empty):
        engine = lowtide.initialize(mlp(), config)
        engine.train_step(vector_batch(0, 1))
        engine.close()
    assert bool(pinned) == pins


@on_device()
def test_an_engine_on_the_cpu_leaves_the_accelerator_alone(tmp_path: Path) -> None:
    device = torch.get_device_module("pretend")
    untouched, held = device.get_rng_state(), torch.accelerator.memory_allocated()  # by what ran before
    with (
        patch.object(device, "get_rng_state", side_effect=AssertionError),
        patch.object(torch.accelerator, "set_device_index", side_effect=AssertionError),
    ):
        engine = lowtide.initialize(mlp(), {"device": "cpu", "optimizer": ADAMW})
        engine.train_step(vector_batch(0, 1))
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        engine.close()
    assert torch.equal(device.get_rng_state(), untouched)
    assert torch.accelerator.memory_allocated() == held
