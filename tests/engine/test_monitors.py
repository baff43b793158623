"""Monitors write each step's numbers, and wait for nothing; a profile says what some steps did."""

import csv
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.engine.model.model_flops import ModelFlops
from lowtide.engine.report.monitors import COLUMNS
from tests.engine.adapted import base
from tests.engine.test_hugging_face import bert, gpt2, llama
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import rank_and_world, refusal, settings, share_of

SGD = {"type": "sgd", "params": {"lr": 0.1}}


def place(folder: Path, name: str = "run") -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": name}


def monitored(folder: Path) -> list[tuple[float, float]]:
    """(loss, norm) of three steps with a table and a board beside them."""
    writers = {"csv_monitor": place(folder), "tensorboard": place(folder, "board")}
    config = settings(3, optimizer=SGD, profile={"peak_tflops": 1.0}, **writers)
    found = []
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for step in range(3):
            result = engine.train_step(share_of(models.token_batch(step, 4)))
            found.append((result.loss.item(), result.grad_norm.item()))
    return found


def losses_of_board(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of each row, as tensorboard reads it."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(one.step, one.value) for one in events.Scalars("train/loss")]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_table_and_the_board_have_what_each_step_was(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    expected = ranks(2, monitored, tmp_path)[0]
    steps, losses = zip(*losses_of_board(tmp_path / "board"), strict=True)
    assert steps == (1, 2, 3) and losses == pytest.approx([loss for loss, _ in expected])
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [(float(row["train/loss"]), float(row["train/grad_norm"])) for row in rows] == expected
    tokens = models.token_batch(0, 4)[0].numel()
    num_params = sum(param.numel() for param in models.tiny_gpt().parameters())
    attention_width = 3 * 22  # blocks of tiny_gpt, and their width
    for row in rows:
        assert list(row) == ["step", *COLUMNS] and float(row["train/lr"]) == 0.1
        seconds = float(row["speed/step_seconds"])
        assert float(row["speed/tokens_per_second"]) == pytest.approx(tokens / seconds)
        assert float(row["speed/samples_per_second"]) == pytest.approx(4 / seconds)
        flops = (6 * num_params + 12 * models.LENGTH * attention_width) / 2 * tokens
        assert float(row["speed/tflops"]) == pytest.approx(flops / seconds / 1e12) == float(row["speed/mfu"])
        assert float(row["memory/parameter_bytes"]) > 0
        phases = [float(row[f"seconds/{phase}"]) for phase in ("forward", "backward", "update")]
        assert all(phase > 0 for phase in phases) and sum(phases) < seconds


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_attention_is_counted_as_torch_counts_it(build: Any) -> None:
    """Of matrix products that are written out; torch's count of its fused attention has the scores once more."""
    model = build()
    model.set_attn_implementation("eager")
    ids = torch.arange(14).view(2, 7)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids)[0].sum().backward()
    counts = {name: kinds.get(torch.ops.aten.bmm, 0) for name, kinds in counter.get_flop_counts().items()}
    # Some versions of transformers multiply to get the angles of positions.
    found = counts["Global"] - sum(count for name, count in counts.items() if name.endswith(".rotary_emb"))
    width = ModelFlops.of(model).attention_width
    assert found == 12 * width * ids.numel() * 7 and width > 0
    flops = ModelFlops(3, width)
    assert flops.of_tokens(14, 7) == found + 6 * 3 * 14


def monitored_axes(folder: Path, parallel: dict[str, Any]) -> None:
    profile = {"enabled": True, "folder": str(folder), "step": 2}
    config = {"optimizer": SGD, "train_batch_size": 4, "gradient_accumulation_steps": 2, "parallel": parallel}
    with lowtide.initialize(base(), config | {"csv_monitor": place(folder), "profile": profile}) as engine:
        ids = torch.arange(4 * 6).view(4, 6) % 50
        share = ids[engine.data_rank :: engine.data_size]
        for _ in range(3):
            engine.train_step({"input_ids": share, "labels": share})


@pytest.mark.parametrize(("num_ranks", "parallel"), [(2, {"sequence": 2}), (4, {"pipeline": 2, "tensor": 2})])
def test_rates_are_of_the_whole_model_and_batch_on_every_axis(
    ranks: RankPool, tmp_path: Path, num_ranks: int, parallel: dict[str, Any]
) -> None:
    ranks(num_ranks, monitored_axes, tmp_path, parallel)
    flops = ModelFlops.of(base())
    for row in rows_of(tmp_path / "run" / "metrics.csv"):
        seconds = float(row["speed/step_seconds"])
        assert float(row["speed/tokens_per_second"]) * seconds == pytest.approx(24)
        assert float(row["speed/tflops"]) * seconds * 1e12 == pytest.approx(flops.of_tokens(24, 6) / num_ranks)
    assert len(list(tmp_path.glob("profile-rank*.json"))) == num_ranks


def test_without_a_batch_size_samples_are_not_guessed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"optimizer": SGD, "csv_monitor": place(tmp_path), "steps_per_print": 1}
    with caplog.at_level(logging.INFO, "lowtide"), lowtide.initialize(models.mlp(), config) as engine:
        engine.train_step(models.vector_batch(0, 4))
    (row,) = rows_of(tmp_path / "run" / "metrics.csv")
    assert row["speed/samples_per_second"] == "" != row["speed/step_seconds"]
    assert "learning rate 0.1" in caplog.text and "samples/s" not in caplog.text


def test_calls_by_hand_count_their_tokens(tmp_path: Path) -> None:
    config = settings(optimizer=SGD, csv_monitor=place(tmp_path), gradient_accumulation_steps=2)
    ids, targets = models.token_batch(0, 2)
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for _ in range(2):
            engine.backward(engine(ids, targets=targets))
            engine.step()
        engine.eval_step((ids, targets))
        for _ in range(2):
            engine(ids, targets=targets).backward()
        engine.step()
    row, other = rows_of(tmp_path / "run" / "metrics.csv")
    assert other["train/loss"] == "" and float(other["train/grad_norm"]) > 0  # the loss is not known
    rate = float(row["speed/tokens_per_second"]) * float(row["speed/step_seconds"])
    assert rate == pytest.approx(2 * ids.numel()) and math.isfinite(float(row["train/loss"]))


def resumed(folder: Path, first: int, last: int, **others: Any) -> lowtide.Engine:
    """Of a job that saves after step 2, goes on from there if it can, and is killed after `last`."""
    engine = lowtide.initialize(models.mlp(), settings(optimizer=SGD, csv_monitor=place(folder), **others))
    if first > 1:
        engine.load_checkpoint(folder / "saved")
    for step in range(first, last + 1):
        engine.train_step(models.vector_batch(step, 2))
        if step == 2:
            engine.save_checkpoint(folder / "saved")
    return engine


def test_a_step_has_one_row_whatever_was_lost_between(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    table = tmp_path / "run" / "metrics.csv"
    board = {"tensorboard": place(tmp_path, "board")}
    killed = resumed(tmp_path, 1, 2, **board)
    assert [row["step"] for row in rows_of(table)] == ["1", "2"]  # step 2 is not made again: it is in the checkpoint
    killed.close()
    resumed(tmp_path, 3, 5, **board).close()
    table.write_text(table.read_text().replace("train/lr", "train/of_before") + "6,0.1")  # an older name, and torn
    with resumed(tmp_path, 3, 4, **board) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        engine.train_step(models.vector_batch(0, 2))
    rows = rows_of(table)
    assert [row["step"] for row in rows] == ["1", "2", "3"] and list(rows[0]) == ["step", *COLUMNS]
    assert rows[0]["train/lr"] == "" and rows[2]["train/lr"] == "0.1"
    assert [step for step, _ in losses_of_board(tmp_path / "board")] == [1, 2, 3]


@pytest.mark.parametrize(("step", "written"), [(1, False), (3, True), (4, True)])
def test_a_profile_after_a_checkpoint_is_of_the_step_it_says(tmp_path: Path, step: int, written: bool) -> None:
    resumed(tmp_path, 1, 2).close()
    resumed(tmp_path, 3, 5, profile={"enabled": True, "step": step, "folder": str(tmp_path)}).close()
    profile = tmp_path / "profile-rank0.json"
    assert profile.exists() == written and (not written or json.loads(profile.read_text())["first_step"] == step)


@pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
@on_ranks(2)
def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path, section: str) -> None:
    (tmp_path / "file").touch()
    kind = RuntimeError if rank_and_world()[0] else ValueError
    writer: dict[str, Any] = {section: place(tmp_path / "file")}
    text = refusal(lowtide.initialize, models.mlp(), settings(**writer), kind=kind)
    texts = ["", ""]
    dist.all_gather_object(texts, text)
    assert texts[0].startswith(f"{section}.output_path: expected a folder that rank 0 can write into, found [Errno ")
    assert texts[1] == f"lowtide.initialize failed on rank 0: {texts[0]}"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("monitors.CsvWriter.write", "csv_monitor: writing failed, nothing more is written there"),
        ("monitors.CsvWriter.close", "csv_monitor: writing failed, nothing more is written there"),
        ("memory_report.MemoryReport.save", "memory_report.folder: writing failed"),
        ("step_profile.StepProfile.save", "profile.folder: writing failed"),
    ],
)
def test_what_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str, said: str
) -> None:
    def fail(self: Any, *_: object) -> None:
        if call == "monitors.CsvWriter.close":
            if self._file is None:
                return  # before the first row
            self._file.close()
        raise OSError("no space left")

    folder = {"folder": str(tmp_path)}
    monkeypatch.setattr(f"lowtide.engine.report.{call}", fail)
    config = settings(
        optimizer=SGD, csv_monitor=place(tmp_path), memory_report=folder, profile={"enabled": True, **folder}
    )
    with lowtide.initialize(models.mlp(), config) as engine:
        for step in range(4):
            engine.train_step(models.vector_batch(step, 2))
    assert [record.getMessage() for record in caplog.records if "no space left" in record.getMessage()] == [
        f"{said}: no space left"
    ]


@pytest.mark.parametrize(("section", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_an_error_with_words(section: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{section}.enabled: expected the package {section}, found that it can"):
        lowtide.initialize(models.mlp(), {"optimizer": SGD, section: {"enabled": True}})


def profiled(folder: Path) -> None:
    section = {"enabled": True, "folder": str(folder), "step": 2}
    config = settings(3, optimizer=SGD, communication={"transport": "sockets"}, profile=section)
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for step in range(3):
            engine.train_step(share_of(models.token_batch(step, 4)))


def head_flops(rows: int) -> int:
    """Of a step: forward, and twice as many backward."""
    head = models.tiny_gpt().get_submodule("head").get_parameter("weight").numel()
    return 3 * 2 * head * rows * models.LENGTH


def test_a_profile_has_a_trace_collectives_and_operations(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, profiled, tmp_path)
    profile = json.loads((tmp_path / "profile-rank1.json").read_text())
    names = [row["name"] for row in profile["collectives"]]
    assert profile["first_step"] == 2 and any(name.startswith("reduction of ") for name in names)
    assert any(name.startswith("gather of ") for name in names) and "the norm of the step" in names
    assert all(row["message_bytes"] > 0 for row in profile["collectives"] if row["name"].startswith("reduction of "))
    flops = profile["flops_by_module"]
    assert flops["head"] == head_flops(2)
    assert flops[""] >= sum(count for name, count in flops.items() if name.count(".") == 0 and name)
    trace = json.loads((tmp_path / "trace-rank1.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert lanes == {"compute", "gather", "reduce", "offload", "wait"}
    assert {"backward", "update"} <= {event["name"].split(" of ")[0] for event in trace if event["ph"] == "X"}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_waits_for_files_are_the_lane_of_offload(tmp_path: Path, device: str) -> None:
    """In a file, so that there is something to wait for; on the CPU host memory is where the parameters are."""
    home = {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    config = settings(3, zero_optimization={"offload_param": home, "offload_optimizer": home})
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        profile = engine.profile()
        engine.train_step(models.token_batch(0, 2))
    moved = [event for event in profile.trace()["traceEvents"] if event.get("cat") == "offload"]
    assert bool(moved) == (device == "nvme") == (profile.seconds_by_lane["offload"] > 0)
    assert all(event["name"].startswith("transfer of ") for event in moved)
    assert not any(row.name.startswith("transfer") for row in profile.collectives)


def test_the_next_steps_are_profiled_where_they_are_asked_for(tmp_path: Path) -> None:
    with lowtide.initialize(models.mlp(), {"optimizer": SGD, "steps_per_print": 0}) as engine:
        profile = engine.profile(2)
        with pytest.raises(ValueError, match=r"engine.profile\(\): expected no profile in progress, found a profile"):
            engine.profile()
        for step in range(3):
            engine.train_step(models.vector_batch(step, 2))
            assert profile.is_done == (step >= 1)
        for write in (profile.save, engine.memory_report().save):  # "" is not the working directory
            assert "expected the path of a folder" in refusal(write, "")
        assert profile.table().startswith("profile of 2 steps from step 1 on:\n  compute ")
        with pytest.raises(ValueError, match=r"engine.profile\(\): expected at least 1 step, found 0"):
            engine.profile(0)


@pytest.mark.parametrize("recorded_step", [3, 4])
def test_a_profile_counts_the_same_where_a_step_s_memory_is_recorded(tmp_path: Path, recorded_step: int) -> None:
    """Steps 3 and 4: the two are entered, or left, together."""
    profile = {"enabled": True, "folder": str(tmp_path), "step": 3, "steps": 2}
    report = {"folder": str(tmp_path), "step": recorded_step}
    with lowtide.initialize(models.tiny_gpt(), settings(profile=profile, memory_report=report)) as engine:
        for step in range(5):
            engine.train_step(models.token_batch(step, 2))
    flops = json.loads((tmp_path / "profile-rank0.json").read_text())["flops_by_module"]
    assert flops["head"] == 2 * head_flops(2)  # of two steps


def run_with_wandb(folder: str) -> list[float]:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
    with lowtide.initialize(models.mlp(), settings(wandb={"enabled": True, "project": "mine"})) as engine:
        return [engine.train_step(models.vector_batch(step, 2)).loss.item() for step in range(2)]


def test_wandb_itself_has_one_run_of_several_ranks(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert len(ranks(2, run_with_wandb, str(tmp_path))) == 2
    (run,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = run.read_bytes()
    assert b"train/loss" in written and b"speed/step_seconds" in written


@pytest.mark.parametrize(
    "version", [{"login.return_value": False}, {"login.side_effect": TypeError, "api.api_key": ""}]
)
def test_wandb_keeps_runs_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: dict[str, Any]) -> None:
    """Of wandb itself, that it is told everything; its own files are its own. Steps that come again: a new run."""
    package = mock.Mock(**version)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    section = {"enabled": True, "project": "mine", "group": "sweep"}
    with lowtide.initialize(models.mlp(), settings(wandb=section)) as engine:
        engine.save_checkpoint(tmp_path)
        losses = [engine.train_step(models.vector_batch(step, 2)).loss.item() for step in range(2)]
        engine.load_checkpoint(tmp_path)
        losses.append(engine.train_step(models.vector_batch(0, 2)).loss.item())
    given = package.init.call_args.kwargs
    assert [given[key] for key in ("project", "group", "entity", "mode")] == ["mine", "sweep", None, "offline"]
    run = package.init.return_value
    told = [(call.kwargs.get("step", call.args[-1]), call.args[0]["train/loss"]) for call in run.log.call_args_list]
    assert told == list(zip((1, 2, 1), losses, strict=True))
    assert run.finish.call_count == package.init.call_count == 2
