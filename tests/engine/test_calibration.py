"""What was measured of a machine: the factors that trials say, and the file from which the next plan begins."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.bin.plan import main as plan_main
from lowtide.comm import World
from lowtide.engine.planning.agreed import machine_here
from lowtide.engine.planning.calibration import Factors, Measured, calibrated, fit
from lowtide.engine.planning.machine import Machine
from lowtide.engine.planning.numbers import device_key, numbers_file, read_numbers, with_numbers, write_numbers


def steps(computing: float, moving: float) -> list[Measured]:
    parts = [(1.0, 0.0), (0.5, 0.5), (0.8, 0.1), (0.3, 0.9), (1.0, 0.4)]
    return [
        Measured({"compute": a / 2, "update": a / 2, "gather exposed": b}, computing * a + moving * b) for a, b in parts
    ]


@pytest.mark.parametrize("true", [Factors(1, 1), Factors(20, 20), Factors(2, 4), Factors(0.5, 0.25)])
def test_the_factors_of_trials_are_found(true: Factors) -> None:
    found = fit(steps(true.computing, true.moving))
    assert found.computing == pytest.approx(true.computing, rel=0.1)
    assert found.moving == pytest.approx(true.moving, rel=0.2)
    worst = max(abs(found.seconds(one) / one.measured - 1) for one in steps(true.computing, true.moving))
    assert worst < 0.1


def test_trials_that_wait_for_nothing_say_one_factor() -> None:
    found = fit([Measured({"compute": 1.0}, 3.0)] * 2)
    assert found.computing == pytest.approx(3.0) and found.moving == pytest.approx(3.0)
    assert fit([]) == Factors()


def test_a_calibrated_machine_is_slower_by_the_factors() -> None:
    machine = calibrated(Machine(), Factors(2, 5))
    assert machine.flops == Machine().flops / 2 and machine.intra == Machine().intra / 5
    assert machine.intra_latency == 5 * Machine().intra_latency and machine.device_bytes == Machine().device_bytes


def test_numbers_are_kept_for_each_device(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "machine.json"
    write_numbers(replace(Machine(), flops=1e12), device_key("cpu", 2), path)
    write_numbers(replace(Machine(), flops=2e14), device_key("NVIDIA H100 80GB HBM3", 8), path)
    assert set(read_numbers(path)) == {"cpu, 2 ranks a host", "NVIDIA H100 80GB HBM3"}
    assert with_numbers(Machine(), "cpu, 2 ranks a host", path) == replace(Machine(), flops=1e12)
    assert with_numbers(Machine(), "cpu, 1 rank a host", path) == Machine()


def test_auto_begins_from_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    monkeypatch.setenv("LOWTIDE_MACHINE", str(path))
    assert numbers_file() == path
    world = World.join("cpu", 60)
    plain, key = machine_here(world, 1)
    path.write_text(json.dumps({key: {"flops": 123.0}}))
    found, _ = machine_here(world, 1)
    world.leave()
    assert key == "cpu, 1 rank a host" and found.flops == 123.0 and found.memory == plain.memory


def test_the_file_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert numbers_file() == tmp_path / "lowtide" / "machine.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected the numbers of machines as JSON, found what cannot be read"),
        ("[1]", 'expected {"device": {"flops": ..., "memory": ...}}, found something else'),
        ('{"cpu": {"flops": "fast"}}', '"cpu": expected positive numbers by the names flops, memory'),
        ('{"cpu": {"num_hosts": 2}}', 'found "num_hosts": 2'),
        ('{"cpu": {"flops": 0}}', 'found "flops": 0'),
    ],
)
def test_a_file_of_something_else_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_numbers(path)
    assert str(refused.value).startswith(f"{path}: ") and said in str(refused.value)


def test_the_command_plans_with_measured_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    words = ["zero3", "--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "128", "--sequence", "32"]
    words += ["--gpus", "2", "--numbers", str(path)]
    seconds = []
    for flops in (1e14, 1e9):
        path.write_text(json.dumps({"GPU": {"flops": flops}}))
        assert plan_main(words) == 0
        said = capsys.readouterr().out
        seconds.append(float(said.partition("a step takes ")[2].partition(" s")[0]))
    assert seconds[1] > 10 * seconds[0]
    assert plan_main([*words, "--device", "other"]) == 1
    assert f'--numbers: expected the entry "other", found in {path}: "GPU"' in capsys.readouterr().err
    path.write_text(json.dumps({"GPU": {}, "other": {}}))
    assert plan_main(words) == 1
    assert "--numbers: expected --device, to say which, found" in capsys.readouterr().err
    assert plan_main([*words[:-2], "--device", "GPU"]) == 1
    assert "--device: expected --numbers FILE beside it" in capsys.readouterr().err
