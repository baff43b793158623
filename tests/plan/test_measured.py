"""The file of a machine's numbers, what is read between them, and the factors that trials add."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import lowtide
from lowtide.bin.plan import main
from lowtide.comm import World
from lowtide.engine.config.config import Config
from lowtide.engine.plan.for_engine import machine_here
from lowtide.engine.plan.machine import Machine, calibrated, fit_factors
from lowtide.engine.plan.measured import VARIABLE, Curve, Factors, Measured, Speeds, curve, device_key
from lowtide.engine.plan.measuring import measure, operations
from lowtide.engine.plan.profile import Operation
from lowtide.engine.plan.step_order import SimulatedTimeline
from lowtide.engine.plan.tracker import Tracker
from tests.kit import models
from tests.kit.training import refusal, settings

MM = curve([[1e3, 1e-5], [1e5, 1e-4], [1e7, 1e-2]])
CURVES = {"float32 mm": MM, "float32 add": curve([[0, 1e-6], [1e6, 1e-3]])}
OPERATIONS = (Operation("mm", "float32", 10**5, 3), Operation("add", "float32", 10**6, 1))
MEASURED = Measured({2: Speeds(2, 1, CURVES)}, {"cpu, 2 ranks a host": Factors(1.5, 2.0)})


def test_between_two_sizes_time_is_a_power_of_the_size() -> None:
    assert MM.seconds(1e3) == 1e-5 and MM.seconds(1e4) == pytest.approx(1e-4 / 10**0.5)
    assert MM.seconds(10) == 1e-5, "what is smaller takes what the smallest does"
    assert MM.seconds(3e7) == pytest.approx(3e-2), "what is larger takes as much more"
    assert MM.most_per_second == pytest.approx(1e9)
    assert Curve((0.0, 1e6), (1e-6, 1e-3)).seconds(5e5) == pytest.approx(5.005e-4)


def test_a_file_has_what_was_measured(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "new" / "machine.json")
    assert Measured.read(tmp_path / "new" / "machine.json") == MEASURED


def test_more_ranks_than_were_measured_share_the_cores() -> None:
    assert MEASURED.speeds(1).seconds("float32 mm", 1e7) == 1e-2
    assert MEASURED.speeds(6).seconds("float32 mm", 1e7) == pytest.approx(3e-2)


def test_an_operation_that_was_not_measured_takes_what_an_addition_does() -> None:
    speeds = MEASURED.speeds(2)
    assert speeds.operation("erfinv", "bfloat16", 1e6) == 1e-3 and speeds.seconds("update", 1e9) == 0.0


def of_mm(seconds: Any) -> dict[str, Any]:
    return {"threads": 1, "seconds": {"mm": seconds}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "expected numbers of a machine, found No such file or directory; write it again: lowtide env --measure"),
        ("{", "expected JSON, found"),
        ("{}", 'expected "format": 1, found None'),
        ({"ranks": {}}, "expected speeds of at least 1 number of ranks, found none"),
        ({"ranks": {"1": {}}}, "expected curves and factors, found KeyError: 'threads'"),
        ({"ranks": {"1": of_mm([[2, 1], [1, 1]])}}, "sizes [2.0, 1.0] do not ascend"),
        ({"ranks": {"1": of_mm([[2, 0]])}}, "seconds [0.0] are not all more than 0"),
        ({"ranks": {}, "factors": {"cpu": {"computing": 0, "moving": 1}}}, "factors 0 and 1 are not both more than 0"),
    ],
)
def test_what_is_no_such_file_is_refused(text: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text if isinstance(text, str) else json.dumps({"format": 1, **text}))
    assert said in refusal(Measured.read, path)


def test_a_measured_machine_has_no_bound_that_is_slower_than_what_was_measured() -> None:
    found = Machine.measured(MEASURED, 2, 1e9)
    both = (3 * 10**5, 10**6, 4)
    assert found.computing("forward", *both, OPERATIONS) == pytest.approx(3e-4 + 1e-3)
    assert found.computing("forward", *both, ()) <= found.computing("forward", *both, OPERATIONS)
    assert not found.overlaps and Machine().overlaps


def test_a_call_takes_longer_the_more_bytes_calls_move() -> None:
    calls = {"forward call": curve([[0, 1e-6], [1e6, 1e-3]]), "backward call": curve([[0, 5e-6]])}
    found = Machine.measured(Measured({1: Speeds(1, 1, CURVES | calls)}), 1, 1e9)
    alone = 3e-4 + 1e-3
    assert found.computing("forward", 0, 4 * 10**6, 4, OPERATIONS) == pytest.approx(alone + 4 * 1e-3)
    assert found.computing("backward", 0, 4 * 10**6, 4, OPERATIONS) == pytest.approx(alone + 4 * 5e-6)
    larger = (Operation("add", "float32", 10**7, 1),)
    assert found.computing("forward", 0, 10**7, 4, larger) == pytest.approx(1e-2 + 1e-3), "no more than was measured"


def test_the_calls_of_older_files_take_the_same_in_forward_and_backward(tmp_path: Path) -> None:
    curves = {"float32 mm": [[1, 1e-5]], "call": [[0, 2e-6]]}
    path = tmp_path / "machine.json"
    ranks = {"1": {"threads": 1, "seconds": curves}}
    path.write_text(json.dumps({"format": 1, "ranks": ranks}))
    speeds = Measured.read(path).speeds(1)
    assert speeds.seconds("forward call", 1e6) == speeds.seconds("backward call") == 2e-6


def test_on_processors_a_collective_is_waited_for_where_it_starts() -> None:
    line = SimulatedTimeline(overlaps=False)
    end = line.start("gather", 3.0)
    line.compute(1.0)
    line.wait("gather", end)
    assert line.now == 4.0 and line.exposed_seconds == 3.0


def test_auto_takes_this_machines_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "machine.json"))
    caplog.set_level("INFO", logger="lowtide")
    for said in ("guessed; `lowtide env --measure` measures them", f"from {tmp_path / 'machine.json'}"):
        lowtide.initialize(
            models.tiny_gpt(), settings(zero_optimization={"stage": "auto"}), sample_batch=models.token_batch(0, 1)
        ).close()
        assert f"speeds of this machine are {said}" in caplog.text
        MEASURED.write(tmp_path / "machine.json")


def test_the_command_plans_for_a_measured_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MEASURED.write(tmp_path / "machine.json")
    arguments = f"zero1 --model tests.kit.models:short_gpt --sequence {models.LENGTH} --global-batch 4".split()
    arguments += ["--gpus", "2", "--machine", str(tmp_path / "machine.json")]
    assert main(arguments) == 0
    assert "a device to spare" in capsys.readouterr().out
    assert main([*arguments, "--intra", "1GB"]) == 1
    assert "has the machine's speeds; leave out options that set them" in capsys.readouterr().err
    Measured({}, {"cpu, 2 ranks a host": Factors()}).write(tmp_path / "machine.json")  # as `lowtide tune` does
    assert main(arguments) == 1
    assert "expected measured speeds, found only factors of `lowtide tune`" in capsys.readouterr().err


def test_a_measurement_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(measure, "_LAUNCH", (sys.executable, "-S", "-c", "import time; time.sleep(60)"))
    said = refusal(measure.measure, print, None, (2,), kind=ChildProcessError)
    assert said == "2 ranks: not done after 0.1 s; measure again when the machine is idle"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_probe_is_one_operation_of_the_planner(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_WIDTHS", (32, 96))  # of larger ones each takes longer, and is as many operations
    monkeypatch.setattr(operations, "_LENGTHS", (32, 128))
    for call in (*operations._products(dtype), *operations._elementwise(dtype, 1 << 10)):
        tracker = Tracker([])
        with torch.no_grad(), tracker:
            call()
            found = [one for one in tracker.counts.operations if one.name not in ("view", "permute")]
        assert len(found) == 1, found


# -- factors of trials ------------------------------------------------------------------------------------------------


def steps(computing: float, moving: float) -> list[tuple[dict[str, float], float]]:
    parts = [(1.0, 0.0), (0.5, 0.5), (0.8, 0.1), (0.3, 0.9), (1.0, 0.4)]
    return [({"compute": a / 2, "update": a / 2, "gather exposed": b}, computing * a + moving * b) for a, b in parts]


@pytest.mark.parametrize("true", [Factors(1, 1), Factors(20, 20), Factors(2, 4), Factors(0.5, 0.25)])
def test_the_factors_of_trials_are_found(true: Factors) -> None:
    found = fit_factors(steps(true.computing, true.moving))
    assert found.computing == pytest.approx(true.computing, rel=0.1)
    assert found.moving == pytest.approx(true.moving, rel=0.2)
    for seconds, measured in steps(true.computing, true.moving):
        waiting = seconds["gather exposed"]
        expected = found.computing * (sum(seconds.values()) - waiting) + found.moving * waiting
        assert expected == pytest.approx(measured, rel=0.1)


def test_trials_that_wait_for_nothing_say_one_factor() -> None:
    found = fit_factors([({"compute": 1.0}, 3.0)] * 2)
    assert found.computing == pytest.approx(3.0) and found.moving == pytest.approx(3.0)
    assert fit_factors([]) == Factors()


def test_a_calibrated_machine_is_slower_by_the_factors() -> None:
    found = calibrated(Machine(), Factors(2, 5))
    assert found.flops == Machine().flops / 2 and found.intra == Machine().intra / 5
    assert found.intra_latency == 5 * Machine().intra_latency and found.device_bytes == Machine().device_bytes
    one = curve([[1.0, 1.0]])
    names = {"float32 mm": 2, "update": 2, "sockets unit 3": 2, "sockets gather": 5, "file write": 5}
    machine = Machine(device="cpu", speeds=Speeds(1, 1, dict.fromkeys(names, one)))
    speeds = calibrated(machine, Factors(2, 5)).speeds
    assert speeds is not None and {name: speeds.seconds(name, 1.0) for name in names} == names


def test_auto_begins_from_what_trials_have_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    monkeypatch.setenv(VARIABLE, str(path))
    world = World.join("cpu", 60)
    plain, key = machine_here(world, 1, Config())
    Measured({}, factors={key: Factors(2, 1), device_key("cpu", 2): Factors(7, 7)}).write(path)
    found, _ = machine_here(world, 1, Config())
    world.leave()
    assert key == "cpu, 1 rank a host" and found.flops == plain.flops / 2 and found.nvme == plain.nvme


def test_auto_offloads_to_the_memory_that_this_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And to the room of the drive, in a folder that is made later."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8e9))
    world: Any = SimpleNamespace(size=2, device=torch.device("cuda"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free={tmp_path: 5e9}[folder]))
    away = {"offload_param": {"nvme_path": str(tmp_path / "new" / "folder")}}
    found, _ = machine_here(world, 1, Config.load({"zero_optimization": away}))
    assert found.device_bytes == 8e9 and found.host_bytes <= psutil.virtual_memory().total
    assert found.nvme_bytes == 5e9


def test_the_command_plans_for_a_device_that_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    words = ["zero3", "--layers", "1", "--hidden", "64", "--heads", "4", "--vocab", "128", "--sequence", "32"]
    words += ["--gpus", "1", "--device", "GPU"]
    seconds = []
    for factor in (1.0, 100.0):
        Measured({}, factors={"GPU": Factors(factor, factor)}).write(path)
        assert main([*words, "--machine", str(path)]) == 0
        said = capsys.readouterr().out
        seconds.append(float(said.partition(" s a step")[0].split()[-1]))
    assert seconds[1] > 10 * seconds[0]
    assert main([*words, "--machine", str(path), "--device", "other"]) == 1
    assert f'--device: expected a device in {path}, found "other"; it has "GPU"' in capsys.readouterr().err
    assert main(words) == 1
    assert "--device: expected --machine FILE with it" in capsys.readouterr().err
