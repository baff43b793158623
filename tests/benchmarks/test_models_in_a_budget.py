"""What a rank of a try does by itself: the model's size and values, the budget, errors of a GPU without memory."""

import dataclasses

import pytest
import torch

from tests.benchmarks import Helper


@pytest.mark.parametrize(("size", "layers", "has_positions"), [("tiny", 1, True), ("tiny", 5, False), ("10M", 2, True)])
def test_parameters_are_counted_without_a_model(helper: Helper, size: str, layers: int, has_positions: bool) -> None:
    model = helper("_model")
    shape = dataclasses.replace(model.SIZES[size], num_layers=layers, has_positions=has_positions)
    with torch.device("meta"):
        assert shape.num_parameters == sum(param.numel() for param in model.build_model(shape).parameters())


def test_a_model_without_values_gets_those_of_the_constructor(helper: Helper) -> None:
    model = helper("_model")
    built = model.build_model(model.SIZES["tiny"])
    with torch.device("meta"):
        filled = model.build_model(model.SIZES["tiny"])
    filled.to_empty(device="cpu")
    for param in filled.parameters():
        param.data.fill_(torch.nan)
    model.initialize_in_place(filled)
    for (name, param), other in zip(built.named_parameters(), filled.parameters(), strict=True):
        spread, expected = float(other.detach().std()), float(param.detach().std())
        assert abs(spread - expected) < 0.3 * expected + 1e-9, name
        assert abs(float((other - param).detach().mean())) < 0.02, name


def test_a_rank_leaves_as_soon_as_it_is_over_its_budget(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, left, samples = helper("_worker"), list[int](), iter([100, 120, 0, 251])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(worker, "leave", left.append)
    monkeypatch.setattr(worker, "rank_bytes", lambda ranks, above=0: next(samples))
    sampler = worker.PeakSampler(True, budget_bytes=150)
    sampler.sample()
    sampler.sample()
    assert left == [] and sampler.peak_bytes == 120 and sampler.start_bytes == 100
    sampler.sample()
    assert left == [worker.OVER_BUDGET_STATUS]


def test_a_gpu_without_memory_is_told_from_other_errors(helper: Helper) -> None:
    is_out_of_memory = helper("_device").is_out_of_memory
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
