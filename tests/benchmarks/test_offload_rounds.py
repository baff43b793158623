"""What benchmarks/offload_io.py makes of the seconds of its rounds."""

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

Script = Callable[[str], ModuleType]
SECONDS = {"load": 1.0, "save": 0.5, "work": 1.2, "window": 2.0, "fio write": 0.6, "fio read": 1.1}
BESIDE = {"fio beside": 1.9, "work beside": 1.4}


def rounds_of(module: ModuleType, *rounds: dict[str, float]) -> object:
    rounds_ = module.Rounds()
    for seconds in rounds:
        for name, value in seconds.items():
            rounds_.add(name, value)
    return rounds_


def test_the_ideal_is_the_longer_of_transfers_and_work(script: Script) -> None:
    module = script("offload_io")
    rounds = rounds_of(module, SECONDS | BESIDE, SECONDS | BESIDE | {"work": 1.8, "work beside": 2.0})
    assert rounds.ideal_shares() == pytest.approx([0.75, 0.9])  # type: ignore[attr-defined]
    assert rounds.ideal_shares_beside() == pytest.approx([0.95, 1.0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_fio", [True, False])
def test_the_table_has_what_was_measured(script: Script, has_fio: bool) -> None:
    module = script("offload_io")
    seconds = {name: value for name, value in (SECONDS | BESIDE).items() if has_fio or "beside" not in name}
    seconds = {name: value for name, value in seconds.items() if has_fio or "fio" not in name}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(module.make_table(rounds_of(module, seconds), 10**9, "title"))
    console.file.close()
    text = console.export_text()
    assert "75 %" in text
    assert ("fio and work beside" in text and "95 %" in text) is has_fio


def test_a_fio_that_fails_ends_the_benchmark(script: Script, tmp_path: Path) -> None:
    module = script("offload_io")
    fio = tmp_path / "fio"
    fio.write_text("#!/bin/sh\necho no room; exit 3\n")
    fio.chmod(fio.stat().st_mode | stat.S_IXUSR)
    process = subprocess.Popen([str(fio)], stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.CalledProcessError, match="non-zero exit status 3") as error:
        module.Disk._bytes_per_second(process)
    assert error.value.output == "no room\n"
