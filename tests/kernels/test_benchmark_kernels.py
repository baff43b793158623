"""The benchmark of kernels has a case for every kernel, finds wrong ones, and reports what it measured."""

import dataclasses
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import lowtide.kernels.dispatch

ROOT = Path(__file__).parents[2]
PEERS = ("torch", "compile")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/kernels.py, on a machine without a GPU."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("benchmark_of_kernels", ROOT / "benchmarks" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class FakeClock:
    """Runs the work, and says that each call took a second more than the one before."""

    def __init__(self) -> None:
        self.seconds = itertools.count(1)

    def run(self, work: Callable[[], object], wait_microseconds: float = 0.0) -> tuple[float, float]:
        work()
        return float(next(self.seconds)), 7.0


def with_form(script: ModuleType, name: str, contender: str, form: Callable[[Any], Any]) -> Any:
    case = script.CASES[name]
    return dataclasses.replace(case, forms={**case.forms, contender: form})


def problem_of(script: ModuleType, case: Any, size: tuple[int, ...], generator: torch.Generator) -> Any:
    return script.Problem(case, size, torch.float32, script.Draw("cpu", generator))


def test_every_kernel_has_a_case(script: ModuleType) -> None:
    folder = Path(lowtide.kernels.dispatch.__file__).parent
    kernels = {path.stem for path in folder.glob("*.py") if re.search(r"uses_triton\(", path.read_text())}
    of_a_few_numbers = {"exact_sum"}  # what they take is a launch, and no bandwidth
    assert kernels - {"dispatch", "operators"} - of_a_few_numbers == {case.file for case in script.CASES.values()}


def test_without_a_gpu_all_are_compared_with_float64(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"
    script.main(["--check-only", "--dtypes", "bfloat16", "--json", str(file)])
    found = json.loads(file.read_text())
    checks = [check["timed"]["0"]["more"] for check in found["settings"]["checks"]]
    assert len(checks) == len(script.CASES)
    assert all(errors and max(errors.values()) <= 1.0 for errors in checks)
    assert f"{len(script.CASES)} comparisons with float64 are right, 0 are not" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["one element", "not written", "another shape"])
def test_a_wrong_kernel_is_found(
    script: ModuleType, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = script.CASES["swiglu"].forms["lowtide"]

    def form(inputs: Any) -> Any:
        y = ours(inputs)["y"]
        if wrong == "another shape":
            return {"y": y[:-1]}
        unwritten = torch.empty_like(y)
        change = torch.zeros_like(y)
        change[-1, -1] = unwritten[-1, -1] if wrong == "not written" else 1e-3
        return {"y": y + change}

    monkeypatch.setitem(script.CASES, "swiglu", with_form(script, "swiglu", "lowtide", form))
    with pytest.raises(SystemExit, match="1"):
        script.main(["--check-only", "--kernels", "swiglu", "--dtypes", "float32"])
    out = capsys.readouterr().out
    if wrong == "another shape":
        assert "wrong: swiglu 5 x 123 float32: RuntimeError" in out
    else:
        found = r"wrong: swiglu 5 x 123 float32: errors over what is allowed, expected at most 1: y (\S+)"
        error = re.search(found, out)
        assert error is not None and float(error[1]) > 1.0
    assert "0 comparisons with float64 are right, 1 are not" in out


def test_an_error_of_the_timing_does_not_hide_a_wrong_kernel(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = with_form(script, "swiglu", "lowtide", lambda inputs: {"y": inputs["gate"] + inputs["up"]})
    monkeypatch.setitem(script.CASES, "swiglu", dataclasses.replace(wrong, sizes=((5, 123),)))
    monkeypatch.setattr(script, "Clock", lambda: Mock(**{"copy_bandwidth.return_value": 1.0}))
    monkeypatch.setattr(script, "forms_of", Mock(side_effect=ZeroDivisionError("no clock")))
    options = script.parse_arguments(["--kernels", "swiglu", "--dtypes", "float32"])
    (check,) = script.run_all(options, Mock()).checks
    assert check.failure.startswith("errors over what is allowed, expected at most 1: y ")
    assert check.failure.endswith(", ZeroDivisionError: no clock")


class _OneByOne(torch.autograd.Function):
    """A linear layer whose gradient adds up term by term in float32, as a GPU's product does; or of rounded inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, is_tf32: bool) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.is_tf32 = is_tf32
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, dlogits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight = ctx.saved_tensors
        dhidden = torch.zeros_like(hidden)
        if ctx.is_tf32:
            dhidden = torch.mm(*((x.contiguous().view(torch.int32) & ~0x1FFF).view(x.dtype) for x in (dlogits, weight)))
        else:
            for column, row in zip(dlogits.t().contiguous().unsqueeze(2), weight.unsqueeze(1), strict=True):
                dhidden.addcmul_(column, row)
        return dhidden, dlogits.t() @ hidden, None


@pytest.mark.parametrize("is_tf32", [False, True])
def test_a_long_sum_in_float32_is_right_and_one_in_tf32_is_not(
    script: ModuleType, is_tf32: bool, generator: torch.Generator
) -> None:
    problem = problem_of(script, script.CASES["linear_cross_entropy"], (32, 16, 4000), generator)

    def form(t: Any) -> Any:
        logits = _OneByOne.apply(t["hidden"], t["weight"], is_tf32)
        return {"loss": torch.nn.functional.cross_entropy(logits, t["labels"])}

    assert (script.Checker(problem).errors(form)["dhidden"] > 1.0) == is_tf32


def test_a_loss_of_float16_is_scaled_as_it_is_in_training(script: ModuleType, generator: torch.Generator) -> None:
    """At the largest size an average gradient of a logit is a number of float16."""
    for name in ("cross_entropy", "linear_cross_entropy"):
        case = script.CASES[name]
        problem = script.Problem(case, case.tiny, torch.float16, script.Draw("cpu", generator))
        rows, *_, classes = case.sizes[-1]
        assert problem.upstream["loss"] / (rows * classes) > torch.finfo(torch.float16).smallest_normal * 2**-10


@pytest.mark.parametrize("peer", PEERS)
def test_peers_compute_the_same(script: ModuleType, peer: str, generator: torch.Generator) -> None:
    for case in script.CASES.values():
        if peer in case.forms:
            errors = script.Checker(problem_of(script, case, case.tiny, generator)).errors(case.forms[peer])
            assert max(errors.values()) <= 1.0, (case.name, errors)


def test_passes_are_timed_and_judged(script: ModuleType, generator: torch.Generator) -> None:
    def failing(inputs: Any) -> Any:
        raise ZeroDivisionError("no such peer")

    problem = problem_of(script, dataclasses.replace(script.CASES["rms_norm"], sizes=((5, 123),)), (5, 123), generator)
    forms = {name: problem.case.forms[name] for name in ("lowtide", "torch")} | {"liger": failing}
    rows = script.time_pass(problem, "forward", forms, FakeClock(), rounds=4)
    losses = problem_of(script, script.CASES["cross_entropy"], (7, 300), generator)
    ours = {"lowtide": losses.case.forms["lowtide"]}
    for which in losses.case.passes:
        rows += script.time_pass(losses, which, ours, FakeClock(), rounds=1)
    forward, of_torch, of_liger, loss, both = rows
    names = ["5 x 123 float32 forward lowtide", "7 x 300 float32 forward lowtide", "7 x 300 float32 both lowtide"]
    assert [row.label for row in (forward, loss, both)] == [
        f"rms_norm {names[0]}",
        *(f"cross_entropy {name}" for name in names[1:]),
    ]
    # After three untimed calls each: ours first, then second, and so on.
    assert [job.step_seconds for _, job in sorted(forward.timed.items())] == [7.0, 10.0, 11.0, 14.0]
    assert [job.step_seconds for _, job in sorted(of_torch.timed.items())] == [8.0, 9.0, 12.0, 13.0]
    assert of_liger.failure == "ZeroDivisionError: no such peer" and not of_liger.timed
    assert forward.more == {"host us": 7.0, "bytes": 4 * (2 * 5 * 123 + 123 + 5)}
    assert both.more["bytes"] == 3 * 4 * 7 * 300 + 2 * 8 * 7
    columns = {column.heading: column for column in script.columns(rows, 1e3)}
    assert columns["ms"].cell(forward) == "10500.0000" and columns["ms"].cell(of_liger) == "-"
    assert columns["of copy"].cell(forward) == f"{forward.more['bytes'] / 10.5 / 1e3:.0%}"
    assert columns["best"].cell(forward) == "torch" and columns["x best"].cell(forward).startswith("1.00 ")
    assert columns["x best"].value(forward) == pytest.approx([7 / 8, 10 / 9, 11 / 12, 14 / 13])
    assert columns["best"].cell(loss) == columns["x best"].cell(loss) == columns["x best"].cell(of_torch) == "-"


def test_what_cannot_be_run_is_said(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^kernels.py: expected a GPU to time kernels on, found none .* --check-only"):
        script.main([])
    with pytest.raises(SystemExit, match="2"):
        script.main(["--rounds", "0"])
    assert "--rounds: expected at least 1, found 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        script.main(["--check-only", "--png", "found.png"])
    assert "--png: expected times to draw, found --check-only" in capsys.readouterr().err
