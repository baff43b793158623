"""Contenders on a cable between two hosts: a rehearsal at a small size, and what is made of its numbers."""

import json
from pathlib import Path

import pytest

from lowtide.engine.config.config import Config
from tests.benchmarks import Helper


def test_fewer_bits_are_fewer_bytes_on_the_cable(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rank on each host. The bytes of other forms are counted in tests/zero and tests/plan."""
    record, image = tmp_path / "wire.json", tmp_path / "wire.png"
    options = ["--size", "tiny", "--warmup", "3", "--steps", "1", "--rounds", "1", "--speeds", "1 Gbit/s"]
    wire, numel = helper("wire"), helper("_model").SIZES["tiny"].num_parameters
    if why := wire.fault():
        pytest.skip(why)
    monkeypatch.setattr(wire, "RANKS_OF_HOST", 1)
    assert wire.main(["--contenders", "onebit", *options, "--json", str(record), "--png", str(image)]) == 0
    (row,) = json.loads(record.read_text())["contenders"]
    sent = 1e6 * row["tables"]["GPT tiny in bf16, two hosts of 1 ranks"]["MB sent by a host in a step"]
    assert image.stat().st_size > 0
    # In bf16, half of the weights twice and half of the gradients, as at stage 3, are 3 bytes a parameter.
    assert 0 < sent < 0.35 * 3 * numel


def test_every_contender_has_a_config_that_loads(helper: Helper) -> None:
    for contender in helper("wire").CONTENDERS.values():
        if contender.kind == "lowtide":
            options = {"zero_optimization": contender.options["zero"], **contender.options["more"]}
            Config.load({"optimizer": {"type": "adamw"}, "bf16": {"enabled": True}, **options}).resolve(4)


def test_rates_are_compared_round_by_round(helper: Helper) -> None:
    harness, wire = helper("_harness"), helper("wire")
    rows = [harness.Row(wire.CONTENDERS[name]) for name in ("plain", "hpz")]
    for number, slow in enumerate((1.0, 10.0, 3.0)):  # of the machine
        for row, seconds in zip(rows, (4 * slow, 2 * slow), strict=True):
            speeds = {"1 Gbit/s": {"seconds": seconds, "bytes": 2e6}}
            row.timed[number] = harness.Result([1.0], [], more=speeds)
    _, milliseconds, rate = wire.columns(rows, ["1 Gbit/s"])
    assert rate.value(rows[0]) == 3 * [1.0] and rate.value(rows[1]) == 3 * [2.0]
    assert milliseconds.cell(rows[1]) == "6000 [dim](2000-20000)[/dim]"


def test_a_machine_without_namespaces_is_told_so(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = helper("wire")
    monkeypatch.setattr(wire, "fault", lambda: "network namespaces need root")
    with pytest.raises(SystemExit, match="expected a machine on which two hosts can be made, found none: network"):
        wire.main([])
