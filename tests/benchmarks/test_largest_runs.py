"""The largest models: the search, jobs that are made up, and what a rank of a try does by itself."""

import dataclasses
import io
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.benchmarks import Helper

MIB = 1 << 20

# MiB of a layer. Beside its layers every model of these tests needs 10 MiB.
MIB_OF_A_LAYER = {"ddp": 20, "fsdp2": 8, "lowtide-0": 19, "lowtide-3": 10}


@pytest.fixture
def largest(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose jobs take memory as `MIB_OF_A_LAYER` says and 10 ms a layer."""
    loaded, harness = helper("largest"), helper("_harness")

    def run(worker: str, options: Any, row: Any, allocator: str | None, **work: Any) -> Any:
        if row.contender.name not in MIB_OF_A_LAYER:
            raise harness.JobError("rank 0 ended with status 1: ValueError: no")
        peak_bytes = (10 + MIB_OF_A_LAYER[row.contender.name] * work["shape"]["num_layers"]) * MIB
        if peak_bytes > 2 * work["budget_bytes"]:
            raise harness.OverBudget("rank 0 needs more memory than it may take")
        seconds = [0.01 * work["shape"]["num_layers"]] * work["steps"]
        return [{"losses": [5.0, 4.0], "seconds": seconds, "peak_bytes": peak_bytes if allocator else None}]

    monkeypatch.setattr(loaded, "run_job", run)
    return loaded


def run(largest: ModuleType, arguments: str, contenders: list[str]) -> tuple[Any, str]:
    """What was found, and what was said meanwhile."""
    given = ["--budget-mib", "200", *arguments.split(), "--contenders", *contenders]
    said = io.StringIO()
    console = Console(file=said, width=200)
    search = largest.Search(largest.parse_arguments(given), console)
    search.run()
    return search, said.getvalue()


def layers_of(found: Any) -> list[int]:
    return [row.largest for row in found.rows]


def test_every_contender_is_searched_and_timed(largest: ModuleType) -> None:
    found, said = run(largest, "--size tiny", [*MIB_OF_A_LAYER])
    assert layers_of(found) == [9, 23, 10, 19]
    assert found.peer.contender.name == "ddp" and not any(row.failure for row in found.rows)
    assert "DDP  8 layers, 0.4 M parameters: peak 170 MiB, fits" in said
    assert "DDP  16 layers, 0.8 M parameters: over 200 MiB, does not fit" in said  # over, and not stopped
    assert "FSDP2  32 layers, 1.6 M parameters: over 200 MiB, does not fit" in said
    fsdp2 = found.rows[1]
    assert found.tokens_per_second(fsdp2) == pytest.approx(2 * 32 / 0.23)
    assert found.ratio(fsdp2) == found.shape(23).num_parameters / found.shape(9).num_parameters


def test_a_contender_that_fails_is_left_out_and_told(largest: ModuleType, helper: Helper) -> None:
    found, said = run(largest, "--start-layers 4", ["ddp", "lowtide-1", "lowtide-3"])
    reason = "4 layers: rank 0 ended with status 1: ValueError: no"
    assert [row.failure for row in found.rows] == [None, reason, None] and reason in said
    assert layers_of(found) == [9, 0, 19] and not found.rows[1].timed
    tables = {"found": largest.columns(found)}
    assert helper("_harness").values_of(found.rows[2], tables)["found"]["x DDP"] == found.ratio(found.rows[2])
    fits = {amount: peak is not None for amount, peak in found.rows[0].tries.items()}
    assert fits == {4: True, 8: True, 16: False, 12: False, 10: False, 9: True}


def test_a_budget_that_is_too_small_for_one_layer_is_told(largest: ModuleType, helper: Helper) -> None:
    found, _ = run(largest, "--budget-mib 25", ["ddp", "fsdp2", "lowtide-3"])
    assert layers_of(found) == [0, 1, 1] and found.peer.contender.name == "fsdp2"
    said = io.StringIO()
    console = Console(file=said, width=200)
    console.print(helper("_harness").table_of(found.rows, largest.columns(found), found.title))
    assert "none fits" in said.getvalue() and "x FSDP2" in said.getvalue()


def test_losses_of_a_model_that_is_not_trained_fail(helper: Helper) -> None:
    check, error = helper("largest").check_losses, helper("_harness").JobError
    check([5.5, 5.5, 5.4])
    with pytest.raises(error, match=r"^expected finite losses, found 5\.5, nan$"):
        check([5.5, float("nan")])
    with pytest.raises(error, match=r"^expected losses that change from step to step on one batch, found 5\.5, 5\.5$"):
        check([5.5, 5.5])


def test_the_longest_sequence_is_searched_for_each_contender(
    largest: ModuleType, helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = helper("_harness")
    kib_of_a_token = {"lowtide-3": 200, "lowtide-3-long": 20}

    def run_job(worker: str, options: Any, row: Any, allocator: str | None, **work: Any) -> Any:
        peak_bytes = kib_of_a_token[row.contender.name] * work["shape"]["sequence_length"] << 10
        if peak_bytes > 2 * work["budget_bytes"]:
            raise harness.OverBudget("rank 0 needs more memory than it may take")
        return [{"losses": [5.0, 4.0], "seconds": [0.01, 0.01], "peak_bytes": peak_bytes}]

    monkeypatch.setattr(largest, "run_job", run_job)
    given = ["--budget-mib", "200", "--sequence", "--contenders", *kib_of_a_token]
    said = io.StringIO()
    search = largest.Search(largest.parse_arguments(given), Console(file=said, width=200))
    search.run()
    assert layers_of(search) == [1024, 10240] and search.ratio(search.rows[1]) == 10.0
    assert "lowtide stage 3  2,048 tokens, 4.2 M parameters: over 200 MiB, does not fit" in said.getvalue()
    assert largest.parse_arguments(given[:-3]).contenders[0].name == "lowtide-3"


# -- the search ------------------------------------------------------------------------------------------------------


def search(
    helper: Helper, truth: int, start: int = 2, most: int = 1024, resolution: float = 0.05
) -> tuple[int, list[int]]:
    """What is found where models of so many layers fit, and what was tried."""
    tried: list[int] = []

    def fits(layers: int) -> bool:
        tried.append(layers)
        return layers <= truth

    return helper("largest").most_layers(fits, start, most, resolution), tried


@pytest.mark.parametrize("resolution", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("start", [1, 2, 7, 100])
def test_what_is_found_fits_and_is_within_the_resolution(helper: Helper, start: int, resolution: float) -> None:
    for truth in [*range(24), 99, 100, 101, 250, 999]:
        found, tried = search(helper, truth, start, resolution=resolution)
        assert found == truth or 0 < truth - found < resolution * found
        assert len(set(tried)) == len(tried) <= 20 and 0 not in tried


# -- a rank ----------------------------------------------------------------------------------------------------------


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
