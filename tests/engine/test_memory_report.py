"""`engine.memory_report()` and `lowtide report`: what a step held, when, and who held it, beside what was predicted."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.bin.report import main
from lowtide.engine.report.memory_report import MemoryReport, reports_in
from tests import models
from tests.engine.test_planned_peak import ROWS, TOLERANCE, batch_of, config_of, gpt
from tests.ranks import RankPool
from tests.zero.training import ADAMW

PLAIN = {"optimizer": ADAMW, "steps_per_print": 0}


def recorded(folder: str, stage: int, route: str) -> dict[str, Any]:
    """What the rank has saved in the third step."""
    report = {"memory_report": {"folder": folder}, "communication": {"route": route}}
    with lowtide.initialize(gpt(), {**config_of(stage, 0, 1), **report}) as engine:
        for number in range(3):
            engine.train_step(batch_of("gpt", number))
        rank = engine.rank
    return vars(MemoryReport.load(Path(folder) / f"memory-rank{rank}.json"))


@pytest.mark.parametrize(("stage", "route"), [(0, "sockets"), (3, "sockets"), (2, "shared_memory"), (3, "native")])
def test_what_a_step_holds_is_what_was_predicted(stage: int, route: str, ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, recorded, str(tmp_path), stage, route):
        assert found["predicted_peak_bytes"] == pytest.approx(found["peak_bytes"], rel=TOLERANCE)
        for kind in ("optimizer_bytes", "buffer_bytes"):
            assert found["measured"][kind] == found["predicted"][kind], kind
        for kind in ("parameter_bytes", "activation_bytes"):
            assert found["measured"][kind] == pytest.approx(found["predicted"][kind], rel=TOLERANCE), kind
        assert sum(found["at_peak"].values()) == found["peak_bytes"]
        others = sum(nbytes for _, nbytes in found["owners"])
        assert others == pytest.approx(found["at_peak"]["activation_bytes"], rel=TOLERANCE)


def test_a_report_without_a_recording_is_of_now() -> None:
    with lowtide.initialize(models.tiny_gpt(), PLAIN) as engine:
        engine.train_step(models.token_batch(0, 2))
        report = engine.memory_report()
        assert report.now == vars(engine.memory()) and report.peak_bytes is None
        assert report.predicted["optimizer_bytes"] == engine.memory().optimizer_bytes
        assert "no step was recorded: engine.record_memory()" in report.why_not
        total = {kind: sum(one[kind] for one in report.by_module.values()) for kind in report.now}
        assert total == report.now


def test_a_prediction_that_there_is_not_has_a_reason(tmp_path: Path) -> None:
    config = {**PLAIN, "memory_report": {"folder": str(tmp_path), "step": 2}, "tiles": {"loss": 8}}
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for step in range(2):
            engine.train_step(models.token_batch(step, 2))
        assert "tiles stand on the model already; `lowtide plan` counts them" in engine.memory_report().why_not


def test_a_step_is_recorded_by_hand_and_says_who_held_what() -> None:
    losses = []
    batches = [models.token_batch(step, 16) for step in range(2)]  # activations are more than gradients
    for records in (False, True):
        torch.manual_seed(0)
        with lowtide.initialize(models.tiny_gpt(), PLAIN) as engine:
            engine.train_step(batches[0])
            if records:
                with engine.record_memory():
                    losses.append(float(engine.train_step(batches[1]).loss))
                report = engine.memory_report()
            else:
                losses.append(float(engine.train_step(batches[1]).loss))
    assert losses[0] == losses[1]
    assert report.owners and any(name.startswith("forward of blocks.0") for name, _ in report.owners)
    assert re.match(r"(forward|backward)", report.moment)
    moments = [moment for moment, _ in report.samples]
    assert moments.index("forward of blocks.0, microbatch 0") < moments.index("backward of blocks.0, microbatch 0")


def test_a_pipeline_is_recorded_on_each_rank(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, of_a_pipeline, str(tmp_path)):
        assert not found.why_not and found.predicted_peak_bytes == pytest.approx(found.peak_bytes, rel=TOLERANCE)
        assert found.measured and found.measured["optimizer_bytes"] == found.predicted["optimizer_bytes"]


def of_a_pipeline(folder: str) -> MemoryReport:
    config = {**config_of(1, 0, 2), "parallel": {"pipeline": 2}, "memory_report": {"folder": folder, "step": 2}}
    with lowtide.initialize(gpt(), config) as engine:
        for number in range(2):
            engine.train_step(models.token_batch(number, 2 * ROWS))
        return MemoryReport.load(Path(folder) / f"memory-rank{engine.rank}.json")


def test_a_recording_without_a_step_is_refused() -> None:
    with lowtide.initialize(models.tiny_gpt(), PLAIN) as engine:
        with (
            pytest.raises(ValueError, match="expected a step while it is recorded, found none"),
            engine.record_memory(),
        ):
            pass
        with engine.record_memory():
            engine.train_step(models.token_batch(0, 2))
            with pytest.raises(ValueError, match="expected it to be ended"), engine.record_memory():
                pass
        engine.train_step(models.token_batch(0, 2))


def test_a_step_without_a_folder_has_a_note() -> None:
    notes = lowtide.Config.load({"memory_report": {"step": 5}}).notes
    assert notes == ("memory_report.step: 5 has no effect here: memory_report.folder is null",)
    with pytest.raises(lowtide.ConfigError, match=r"memory_report.step: expected at least 2, found 1"):
        lowtide.Config.load({"memory_report": {"folder": "a", "step": 1}})


def test_the_command_shows_the_fullest_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**PLAIN, "train_micro_batch_size_per_gpu": ROWS, "memory_report": {"folder": str(tmp_path), "step": 2}}
    with lowtide.initialize(gpt(), config) as engine:
        for number in range(2):
            engine.train_step(batch_of("gpt", number))
    picture = tmp_path / "timeline.png"
    assert main([str(tmp_path), "--png", str(picture)]) == 0 and picture.stat().st_size > 1000
    said = capsys.readouterr().out
    for part in (
        "rank 0, after step 2",
        "predicted",
        "the peak was in: ",
        "forward of blocks.0",
        "model states by unit",
    ):
        assert part in said, part
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == reports_in(tmp_path)[0].peak_bytes
    assert main([str(tmp_path), "--rank", "7"]) == 1
    assert "expected a rank of 0, found --rank 7" in capsys.readouterr().err


def saved(folder: Path, rank: int, world_size: int) -> None:
    MemoryReport(rank, world_size, 3, {"parameter_bytes": rank}, {}, {}, why_not="[/no] markup").save(folder)


def test_ranks_of_a_larger_run_before_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, world_size in ((0, 2), (1, 2), (2, 4), (3, 4)):
        saved(tmp_path, rank, world_size)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 1, the fullest of 2, after step 3" in said and "[/no] markup" in said
    assert main([str(tmp_path), "--rank", "0"]) == 0  # which is not
    assert "rank 0, after step 3" in capsys.readouterr().out
    (tmp_path / "memory-rank1.json").unlink()
    assert main([str(tmp_path)]) == 0
    assert "rank 0 of 2 ranks (the others have no file here), after step 3" in capsys.readouterr().out


def test_a_picture_that_cannot_be_drawn_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 0, 1)
    found = replace(reports_in(tmp_path)[0], samples=[("forward", {"parameter_bytes": 1})])
    found.save(tmp_path)
    assert main([str(tmp_path), "--png", str(tmp_path / "no" / "a.png")]) == 1
    assert "lowtide report: [Errno 2] No such file or directory" in capsys.readouterr().err
    assert main([str(tmp_path), "--png", str(tmp_path / "a.pgn")]) == 1
    assert "lowtide report: Format 'pgn' is not supported" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(tmp_path), "--png", str(tmp_path / "a.png")]) == 1
    assert 'a picture needs matplotlib: pip install "lowtide[examples]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "expected memory-rank0.json and so on, found none; a step is recorded where the config says"),
        ("{}", "expected a file that engine.memory_report().save() has written"),
    ],
)
def test_a_folder_without_reports(text: str | None, said: str, tmp_path: Path, capsys: Any) -> None:
    if text is not None:
        (tmp_path / "memory-rank0.json").write_text(text)
    assert main([str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
