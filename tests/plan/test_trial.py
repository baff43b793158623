"""A process that `lowtide tune` has started: the script's own code, with another config, for some steps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engine.step.batch import described, made
from lowtide.engine.trial import VARIABLE, Trial, TrialRequest, laid_over
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, refusal

OWN = {"train_batch_size": 4, "optimizer": ADAMW, "steps_per_print": 0, "checkpoint": {"keep_last": 2}}


def asked(folder: Path, task: str, config: dict[str, Any], **more: Any) -> None:
    TrialRequest(task, config, str(folder / "result.json"), warmup=1, steps=2, **more).write(folder / "request.json")


def script(folder: str) -> tuple[Any, list[str]]:
    """(exit status, what it has saved) of a script that trains and saves, as ranks run it."""
    with pytest.MonkeyPatch.context() as patch:
        place = Path(folder)
        patch.setenv(VARIABLE, str(place / "request.json"))
        with pytest.raises(SystemExit) as end, lowtide.initialize(models.tiny_gpt(), OWN) as engine:
            for number in range(10):
                engine.save_checkpoint(place / "saved")
                engine.export(place / "exported")
                engine.train_step(tuple(one[: 4 // engine.data_size] for one in models.token_batch(number, 4)))
        saved = [name for name in ("saved", "exported") if (place / name).exists()]
        return end.value.code, saved


def test_a_trial_ends_the_script_after_its_steps_and_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    asked(tmp_path, "measure", {"zero_optimization": {"stage": 2}})
    assert ranks(2, script, str(tmp_path)) == [(0, [])] * 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["num_steps"] == 3 and len(result["steps"]) == 2 and result["samples"] == 4
    assert result["step_seconds"] == pytest.approx(sum(result["steps"]) / 2)
    assert result["config"] == {**OWN, "zero_optimization": {"stage": 2}}
    assert result["batch"]["list"][0] == {"shape": [2, models.LENGTH], "dtype": "int64"}


def test_a_plan_is_of_the_scripts_model_and_batch(tmp_path: Path) -> None:
    batch = described(models.token_batch(0, 2))
    asked(tmp_path, "plan", {}, batch=batch, num_plans=13)
    assert script(str(tmp_path)) == (0, [])
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["best"]) == 13 and result["device"] == "cpu, 1 rank a host"
    assert result["given"]["config"] == OWN and result["given"]["choice"]["stage"] == 0
    for one in result["best"]:
        assert one["config"]["checkpoint"] == {"keep_last": 2} and one["seconds"]["compute"] > 0
        assert lowtide.Config.load(one["config"]).resolve(1).train_batch_size == 4


def test_a_plan_keeps_the_samples_of_a_step(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2}
    asked(tmp_path, "plan", config, batch=described(models.token_batch(0, 2)))
    script(str(tmp_path))
    best = json.loads((tmp_path / "result.json").read_text())["best"]
    assert {one["config"]["train_batch_size"] for one in best} == {12} and len(best) > 3


def test_the_batch_is_known_before_a_step_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(tmp_path, "measure", {})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "request.json"))
    with lowtide.initialize(models.tiny_gpt(), OWN) as engine:
        engine(*models.token_batch(0, 4))
        result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"num_steps": 0, "batch": described(models.token_batch(0, 4))}


def test_why_there_is_no_plan_is_written(ranks: RankPool, tmp_path: Path) -> None:
    asked(tmp_path, "plan", {}, batch=described((torch.zeros(2, 3),)))
    assert ranks(2, script, str(tmp_path)) == [(0, [])] * 2
    assert "forward" in json.loads((tmp_path / "result.json").read_text())["failure"]


def test_a_model_whose_loss_the_script_computes_is_planned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(tmp_path, "plan", {}, batch=described((torch.zeros(2, 5),)))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "request.json"))
    with pytest.raises(SystemExit):
        lowtide.initialize(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)), OWN)
    assert json.loads((tmp_path / "result.json").read_text())["best"]


def test_the_first_engine_that_trains_is_tried_with_a_note_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked(tmp_path, "measure", {"gradient_clipping": 0.5})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "request.json"))
    clippings = []
    caplog.set_level("INFO", logger="lowtide")
    for config in ({}, OWN, OWN):
        with lowtide.initialize(models.tiny_gpt(), config) as engine:
            clippings.append(engine.config.gradient_clipping)
    assert clippings == [0.0, 0.5, 0.0]
    (said,) = [line for line in caplog.messages if line.startswith("trial of `lowtide tune`")]
    assert re.search(r'in the place of the script\'s config stands \{.*"gradient_clipping": 0.5', said)


def test_a_variable_that_names_no_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    said = "LOWTIDE_TRIAL: expected a file of `lowtide tune` that every host sees, found"
    assert said in refusal(lowtide.initialize, models.tiny_gpt(), OWN)


@pytest.mark.parametrize(
    ("config", "own", "merged"),
    [
        ({}, {"seed": 1}, {"seed": 1}),
        ({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}, {"a": {"b": 1, "c": 3}}),
        (
            {"train_batch_size": 8},
            {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "seed": 1},
            {"train_batch_size": 8, "seed": 1},
        ),
        ({"optimizer": {"type": "sgd"}}, {"optimizer": ADAMW}, {"optimizer": {"type": "sgd"}}),
    ],
)
def test_a_config_is_laid_over_the_scripts_own(config: Any, own: Any, merged: Any) -> None:
    assert laid_over(config, own) == merged


def test_a_batch_is_described_without_its_values() -> None:
    batch = {"x": torch.zeros(2, 3, dtype=torch.bfloat16), "rest": (torch.ones(2, dtype=torch.int64), None, 5, "a")}
    found = made(json.loads(json.dumps(described(batch))))
    assert found["x"].shape == (2, 3) and found["x"].dtype == torch.bfloat16 and found["x"].device.type == "meta"
    assert found["rest"][0].dtype == torch.int64 and found["rest"][1:] == (None, 5, "a")


def test_the_batch_of_a_shared_sequence_is_written_whole() -> None:
    """A rank sees its part of it, after a few tokens with which the engine tries whether the model can be split."""
    trial, module = Trial(TrialRequest("measure", {}, ""), _num_sharers=2), torch.nn.Identity()
    whole = {"position_ids": torch.zeros(3, 8), "x": torch.zeros(3, 8, 5), "mask": torch.zeros(3, 7), "total": 24}
    for tokens, is_training in ((2, False), (4, True), (3, True)):
        part = {**whole, "position_ids": torch.zeros(3, tokens), "x": torch.zeros(3, tokens, 5)}
        trial._see(module.train(is_training), (), part)
    assert trial.batch == described(whole)
