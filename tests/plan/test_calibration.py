"""What was measured of a machine: the factors that trials say, and the file from which the next plan begins."""

from pathlib import Path

import pytest

from lowtide.bin.plan import main as plan_main
from lowtide.comm import World
from lowtide.engine.plan.asked import machine_here
from lowtide.engine.plan.machine import Machine, calibrated, fit
from lowtide.engine.plan.measured import Factors, Measured, Speeds, curve, device_key


def steps(computing: float, moving: float) -> list[tuple[dict[str, float], float]]:
    parts = [(1.0, 0.0), (0.5, 0.5), (0.8, 0.1), (0.3, 0.9), (1.0, 0.4)]
    return [({"compute": a / 2, "update": a / 2, "gather exposed": b}, computing * a + moving * b) for a, b in parts]


@pytest.mark.parametrize("true", [Factors(1, 1), Factors(20, 20), Factors(2, 4), Factors(0.5, 0.25)])
def test_the_factors_of_trials_are_found(true: Factors) -> None:
    found = fit(steps(true.computing, true.moving))
    assert found.computing == pytest.approx(true.computing, rel=0.1)
    assert found.moving == pytest.approx(true.moving, rel=0.2)
    for seconds, measured in steps(true.computing, true.moving):
        waiting = seconds["gather exposed"]
        expected = found.computing * (sum(seconds.values()) - waiting) + found.moving * waiting
        assert expected == pytest.approx(measured, rel=0.1)


def test_trials_that_wait_for_nothing_say_one_factor() -> None:
    found = fit([({"compute": 1.0}, 3.0)] * 2)
    assert found.computing == pytest.approx(3.0) and found.moving == pytest.approx(3.0)
    assert fit([]) == Factors()


def test_a_calibrated_machine_is_slower_by_the_factors() -> None:
    machine = calibrated(Machine(), Factors(2, 5))
    assert machine.flops == Machine().flops / 2 and machine.intra == Machine().intra / 5
    assert machine.intra_latency == 5 * Machine().intra_latency and machine.device_bytes == Machine().device_bytes


def test_curves_are_slower_by_the_factor_of_their_kind() -> None:
    one = curve([[1.0, 1.0]])
    names = {"float32 mm": 2, "update": 2, "sockets unit 3": 2, "sockets gather": 5, "file write": 5}
    machine = Machine(device="cpu", speeds=Speeds(1, 1, dict.fromkeys(names, one)))
    speeds = calibrated(machine, Factors(2, 5)).speeds
    assert speeds is not None and {name: speeds.seconds(name, 1.0) for name in names} == names


def test_auto_begins_from_what_trials_have_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    monkeypatch.setenv("LOWTIDE_MACHINE", str(path))
    world = World.join("cpu", 60)
    plain, key = machine_here(world, 1)
    Measured({}, factors={key: Factors(2, 1), device_key("cpu", 2): Factors(7, 7)}).write(path)
    found, _ = machine_here(world, 1)
    world.leave()
    assert key == "cpu, 1 rank a host" and found.flops == plain.flops / 2 and found.nvme == plain.nvme


def test_the_command_plans_for_a_device_that_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    words = ["zero3", "--layers", "1", "--hidden", "64", "--heads", "4", "--vocab", "128", "--sequence", "32"]
    words += ["--gpus", "1", "--device", "GPU"]
    seconds = []
    for factor in (1.0, 100.0):
        Measured({}, factors={"GPU": Factors(factor, factor)}).write(path)
        assert plan_main([*words, "--machine", str(path)]) == 0
        said = capsys.readouterr().out
        seconds.append(float(said.partition(" s a step")[0].split()[-1]))
    assert seconds[1] > 10 * seconds[0]
    assert plan_main([*words, "--machine", str(path), "--device", "other"]) == 1
    assert f'--device: expected a device in {path}, found "other"; it has "GPU"' in capsys.readouterr().err
    assert plan_main(words) == 1
    assert "--device: expected --machine FILE with it" in capsys.readouterr().err
