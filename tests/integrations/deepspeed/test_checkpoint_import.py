"""What DeepSpeed has saved goes on here."""

import json
import pickle
import shutil
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.deepspeed as deepspeed
from lowtide.bin.checkpoint import main
from lowtide.checkpoint.files import CheckpointError, NoCheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.deepspeed.checkpoint_files import load_pickle, read_deepspeed
from lowtide.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.integrations.deepspeed.scripts import DATA, batches, config, engine_of, layers, net, train
from tests.kit.ranks import on_ranks
from tests.kit.training import differences, refusal

MASTERS = "single_partition_of_fp32_groups"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, what `lowtide checkpoint import` makes of what DeepSpeed has saved."""
    folder = tmp_path_factory.mktemp("imported")
    for name in ("stage0", "stage3", "pipeline"):
        assert main(["import", str(DATA / name), str(folder / name)]) == 0
    return {name: folder / name for name in ("stage0", "stage3", "pipeline")}


@on_ranks(2)
@pytest.mark.parametrize(("name", "stage"), [("stage0", 3), ("stage3", 1)])
def test_masters_moments_and_counters_are_taken_over(imported: dict[str, Path], name: str, stage: int) -> None:
    saved, engine = read_deepspeed(DATA / name), engine_of(stage)
    path, client_state = engine.load_checkpoint(imported[name])
    assert path.endswith("global_step12") and client_state == {"epoch": 3}
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (12, 24, 192)
    assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 11}
    param = engine.module.b[1].weight
    before = safe_get_full_fp32_param(param)
    assert torch.equal(before, saved.weights["b.1.weight"])
    for state in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(safe_get_full_optimizer_state(param, state), saved.states["b.1.weight"][state])
    for x, y in batches(7, 2):
        engine.backward(engine(x, y))
        engine.step()
    # The 13th update is Adam's with these moments, clipped to a norm of 1: no element moves by more than the rate.
    assert 0 < (safe_get_full_fp32_param(param) - before).abs().max() < 0.02
    engine.destroy()


def test_stages_have_the_same_values() -> None:
    """Of one training, saved by DeepSpeed at two stages."""
    first, second = (read_deepspeed(DATA / name) for name in ("stage0", "stage3"))
    assert first.weights.keys() == second.weights.keys()
    for name, value in first.weights.items():
        torch.testing.assert_close(value, second.weights[name], atol=1e-6, rtol=0)
        for state, values in first.states[name].items():
            torch.testing.assert_close(values, second.states[name][state], atol=1e-6, rtol=0)


def test_sub_groups_of_stage_3_are_read_as_a_whole_group(tmp_path: Path) -> None:
    """A group of more elements than `sub_group_size` is several flat tensors, each with its shapes and states."""
    sizes = [128 // 2 + 16 // 2, 256 // 2 + 16 // 2, 514 - 72 - 136]
    shutil.copytree(DATA / "stage3", tmp_path / "saved")
    for path in (tmp_path / "saved").rglob("*optim_states.pt"):
        content = load_pickle(path)["optimizer_state_dict"]
        base, (flat,) = content["optimizer_state_dict"], content["fp32_flat_groups"]
        base["param_groups"][0]["params"] = [0, 1, 2]
        step, *moments = base["state"].pop(0).values()
        for index, parts in enumerate(zip(*(moment.split(sizes) for moment in moments), strict=True)):
            base["state"][index] = {"step": step, **dict(zip(("exp_avg", "exp_avg_sq"), parts, strict=True))}
        part = {"fp32_flat_groups": list(flat.split(sizes)), "optimizer_state_dict": base}
        torch.save({"optimizer_state_dict": part}, path)
    for path in (tmp_path / "saved").rglob("*model_states.pt"):
        content = load_pickle(path)
        shapes = list(content["param_shapes"][0].items())
        torch.save({**content, "param_shapes": list(map(dict, (shapes[:2], shapes[2:4], shapes[4:])))}, path)
    found, expected = read_deepspeed(tmp_path / "saved"), read_deepspeed(DATA / "stage3")
    assert found.num_updates == expected.num_updates and found.groups == expected.groups
    assert found.group_names == expected.group_names
    assert differences(found.weights, expected.weights) == [] and found.states.keys() == expected.states.keys()
    for name, states in expected.states.items():
        assert differences(found.states[name], states) == []


@pytest.mark.parametrize("first", [5, 6])
def test_parameters_of_stage_0_are_found_by_shape(tmp_path: Path, first: int) -> None:
    """torch numbers them through the groups. The file has neither their names nor ties. `first`: size of group 0."""
    shutil.copytree(DATA / "stage0", tmp_path / "saved")
    (path,) = (tmp_path / "saved").rglob("mp_rank_00_model_states.pt")
    content, expected = load_pickle(path), read_deepspeed(DATA / "stage0")
    module, optimizer = content["module"], content["optimizer"]
    names = list(module)
    order = sorted(range(10), key=lambda index: -module[names[index]].ndim)  # the 5 weights, then the 5 biases
    split = [order[:first], order[first:]]
    masters = [[expected.weights[names[index]] for index in group] for group in split]
    (options,) = optimizer["param_groups"]
    state = {number: optimizer["state"][index] for number, index in enumerate(order)}
    groups = [{**options, "params": list(range(first))}, {**options, "params": list(range(first, 10))}]
    content["module"] = {name: value.bfloat16() for name, value in module.items()}
    content["module"]["tied"] = content["module"]["a.weight"]
    inner = {"state": state, "param_groups": groups}
    scale = {"dynamic_loss_scale": True, "cur_scale": 64.0, "cur_iter": 12, "last_overflow_iter": 1, "scale_window": 5}
    content["optimizer"] = {"optimizer_state_dict": inner, "fp32_groups": masters, **scale}
    torch.save(content, path)
    found = read_deepspeed(tmp_path / "saved")
    assert found.aliases == {"tied": "a.weight"} and found.loss_scaler["scale"] == 64.0
    assert found.loss_scaler["steps_without_overflow"] == 4  # the next step raises the scale, after 2 x 5 steps
    if first == 6:  # 'a.bias' and 'b.0.bias' have one shape, and are the next of their groups
        assert found.groups == [] and found.states == {} and set(found.weights) == set(names)
        return
    assert found.group_names == [[names[index] for index in group] for group in split]
    assert differences(found.weights, expected.weights) == [] and found.states.keys() == expected.states.keys()
    for name, states in expected.states.items():
        assert differences(found.states[name], states) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_a_flat_group_of_stage_0_is_read_in_the_order_of_its_values(tmp_path: Path, is_known: bool) -> None:
    """FusedAdam's in float16. The file has neither names nor shapes of its parameters."""
    shutil.copytree(DATA / "stage0", tmp_path / "saved")
    (path,) = (tmp_path / "saved").rglob("mp_rank_00_model_states.pt")
    content, expected = load_pickle(path), read_deepspeed(DATA / "stage0")
    order = list(content["module"]) if is_known else sorted(content["module"], reverse=True)
    flats = [
        torch.cat([values[name].reshape(-1) for name in order])
        for values in (
            expected.weights,
            *({n: s[k] for n, s in expected.states.items()} for k in ("exp_avg", "exp_avg_sq")),
        )
    ]
    state = {"step": 12, "exp_avg": flats[1], "exp_avg_sq": flats[2]}
    inner = {"state": {0: state}, "param_groups": [{**expected.groups[0], "params": [0]}]}
    content["module"] = {name: value.half() for name, value in content["module"].items()}
    content["optimizer"] = {"optimizer_state_dict": inner, "fp32_groups_flat": flats[:1], "cur_scale": 64.0}
    torch.save(content, path)
    found = read_deepspeed(tmp_path / "saved")
    assert found.groups == (expected.groups if is_known else []) and found.loss_scaler["scale"] == 64.0
    assert (differences(found.weights, expected.weights) == []) == is_known
    assert found.states.keys() == (expected.states.keys() if is_known else set())
    assert all(differences(states, expected.states[name]) == [] for name, states in found.states.items())


@pytest.mark.parametrize(("name", "key"), [("stage3", "fp32_flat_groups"), ("stage2_bf16", MASTERS)])
def test_a_rank_without_flat_groups_is_told(tmp_path: Path, name: str, key: str) -> None:
    shutil.copytree(DATA / name, tmp_path / "saved")
    path = max((tmp_path / "saved").rglob("*optim_states.pt"))
    content = load_pickle(path)
    content["optimizer_state_dict"][key] = []
    torch.save(content, path)
    text = refusal(read_deepspeed, tmp_path / "saved", "global_step12", kind=CheckpointError)
    assert text.endswith("expected 1 flat groups on each rank, found 0")


def test_stage_3_without_files_of_the_optimizer_is_told(tmp_path: Path) -> None:
    """The files of the model have no values."""
    shutil.copytree(DATA / "stage3", tmp_path / "saved")
    for path in (tmp_path / "saved").rglob("*optim_states.pt"):
        path.unlink()
    text = refusal(read_deepspeed, tmp_path / "saved", kind=CheckpointError)
    assert text.endswith("expected the values of 10 parameters ('a.weight') in files of the optimizer, found none")


def test_experts_in_files_beside_the_model_are_told(tmp_path: Path) -> None:
    """The file of the model lacks them, and a rank's flat groups have those of this rank alone."""
    shutil.copytree(DATA / "stage0", tmp_path / "saved")
    (tmp_path / "saved" / "global_step12" / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    text = refusal(read_deepspeed, tmp_path / "saved", kind=CheckpointError)
    assert "expected no experts of deepspeed.moe, found 1 (layer_0_expert_0_mp_rank_00_model_states.pt, ...)" in text
    assert text.endswith("torch.save them as pytorch_model.bin, and import its folder")


@pytest.mark.parametrize("name", ["stage2_bf16", "stage3"])
def test_a_universal_checkpoint_has_masters_and_states_in_files(tmp_path: Path, name: str) -> None:
    """As `ds_to_universal` writes them: at stage 3 flat and padded, else with their shape in a dictionary."""
    expected, saved = read_deepspeed(DATA / name, "global_step12"), tmp_path / "saved"
    shutil.copytree(DATA / name / "global_step12", saved)
    for path in saved.rglob("*optim_states.pt"):
        part = load_pickle(path)["optimizer_state_dict"]
        path.unlink()
    for parameter, states in expected.states.items():
        (saved / "zero" / parameter).mkdir(parents=True)
        values = {"fp32": expected.weights[parameter], **states}
        for state, value in values.items():
            padded = torch.cat([value.reshape(-1), torch.ones(1)])
            torch.save(padded if name == "stage3" else {"param": value}, saved / "zero" / parameter / f"{state}.pt")
        torch.save(torch.tensor(12.0), saved / "zero" / parameter / "step.pt")
    groups = [{**expected.groups[0], "params": [0]}]
    torch.save({**part, "param_groups": groups}, saved / "zero" / "optimizer_state.pt")
    found = read_deepspeed(saved)
    assert found.groups == expected.groups and (found.num_updates, found.tag) == (12, "saved")
    assert differences(found.weights, expected.weights) == [] and found.states.keys() == expected.states.keys()
    for parameter, states in expected.states.items():
        assert differences(found.states[parameter], states) == []


def test_what_the_files_hold_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as what was made of it, and the import writes that."""
    read: list[weakref.ref[Any]] = []

    def load(path: Path) -> Any:
        content = load_pickle(path)
        read.extend(map(weakref.ref, content.get("optimizer_state_dict", {}).get("fp32_flat_groups", ())))
        return content

    monkeypatch.setattr("lowtide.deepspeed.checkpoint_files.load_pickle", load)
    found = read_deepspeed(DATA / "stage3")
    assert found.weights and read and not any(flat() is not None for flat in read)


def test_masters_of_bf16_are_float32() -> None:
    found = read_deepspeed(DATA / "stage2_bf16", "global_step12")
    assert set(found.compute_dtypes.values()) == {torch.bfloat16}
    assert {value.dtype for value in found.weights.values()} == {torch.float32}
    assert not torch.equal(found.weights["a.weight"], found.weights["a.weight"].bfloat16().float())
    assert found.num_updates == 12


@on_ranks(2)
def test_layers_of_a_pipeline_are_taken_over(imported: dict[str, Path]) -> None:
    config = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=layers(), config=config)
    said = refusal(engine.load_checkpoint, imported["pipeline"], kind=CheckpointError)
    assert "it has 0 parameter groups, the optimizer 1; engine.load_weights(folder) (load_module_only=True in" in said
    path, _ = engine.load_checkpoint(imported["pipeline"], load_module_only=True)
    found = engine.module_state_dict()
    engine.destroy()
    saved = read_deepspeed(DATA / "pipeline").weights
    assert path is not None
    if deepspeed.comm.get_rank() == 0:
        assert found.keys() == saved.keys() and all(torch.equal(found[name], value) for name, value in saved.items())


def test_of_a_pipeline_only_weights_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In half precision and with ZeRO each stage has files as of a rank of model parallelism."""
    folder = shutil.copytree(DATA / "pipeline", tmp_path / "saved") / "global_step5"
    for name in ("mp_rank_01_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"):
        (folder / name).touch()
    main_file = folder / "mp_rank_00_model_states.pt"
    torch.save({**load_pickle(main_file), "optimizer": {"clip_grad": 0.0}, "param_shapes": [{}]}, main_file)
    assert main(["import", str(tmp_path / "saved"), str(tmp_path / "ours")]) == 0
    assert "no optimizer states: load only the weights" in capsys.readouterr().out
    assert differences(read_deepspeed(folder).weights, read_deepspeed(DATA / "pipeline").weights) == []
    (folder / "layer_00-model_01-model_states.pt").touch()
    assert "expected one rank of model parallelism" in refusal(read_deepspeed, folder, kind=CheckpointError)


def test_gaps_between_aligned_parameters_are_left_out(tmp_path: Path) -> None:
    """Of `zero_optimization.parameter_alignment`: here 8 elements behind the first parameter, of 128."""
    shutil.copytree(DATA / "stage2_bf16", tmp_path / "saved")
    for path in (tmp_path / "saved").rglob("*rank_0_mp_rank_00_optim_states.pt"):
        content = load_pickle(path)
        part = content["optimizer_state_dict"]
        state = part["base_optimizer_state"]["state"][0]
        part["param_alignment_paddings"] = [[8, *[0] * 9]]
        for of, key in ((part[MASTERS], 0), (state, "exp_avg"), (state, "exp_avg_sq")):
            of[key] = torch.cat([of[key][:128], torch.full((8,), 7.0), of[key][128:]])
        torch.save(content, path)
    found, expected = (read_deepspeed(folder, "global_step12") for folder in (tmp_path / "saved", DATA / "stage2_bf16"))
    assert differences(found.weights, expected.weights) == []
    for name, states in expected.states.items():
        assert differences(found.states[name], states) == []


@on_ranks(1)
@pytest.mark.parametrize(("kind", "more"), [("RMSprop", []), ("Adadelta", ["acc_delta"])])
def test_states_of_the_callers_optimizer_are_taken_over(tmp_path: Path, kind: str, more: list[str]) -> None:
    """Of a class of torch that is none of ours. The config then names no optimizer."""
    shutil.copytree(DATA / "stage0", tmp_path / "saved")
    (path,) = (tmp_path / "saved").rglob("mp_rank_00_model_states.pt")
    content = load_pickle(path)
    del content["ds_config"]["optimizer"]
    make = partial(getattr(torch.optim, kind), lr=0.01)
    content["optimizer"]["param_groups"] = [make([nn.Parameter(torch.ones(1))]).state_dict()["param_groups"][0]]
    content["optimizer"]["param_groups"][0]["params"] = list(range(10))
    for state in content["optimizer"]["state"].values():
        state["square_avg"] = state.pop("exp_avg_sq")
        state |= {name: state["exp_avg"].square() for name in more}
        del state["exp_avg"]
    torch.save(content, path)
    assert main(["import", str(tmp_path / "saved"), str(tmp_path / "ours")]) == 0
    model = net()
    settings = {key: value for key, value in config(1).items() if key != "optimizer"}
    engine: Any = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=settings)[0]
    engine.load_checkpoint(tmp_path / "ours")
    expected = content["optimizer"]["state"][2]["square_avg"]
    assert torch.equal(safe_get_full_optimizer_state(engine.module.b[0].weight, "square_avg"), expected)
    train(engine, 0, 2)
    assert engine.was_step_applied()
    engine.destroy()


def test_an_import_replaces_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DATA / "pipeline", tmp_path / "saved")
    assert main(["import", str(tmp_path / "saved"), str(tmp_path / "ours")]) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for target in (tmp_path / "saved", tmp_path / "ours"):  # what it reads, and a training with lowtide
        assert main(["import", str(tmp_path / "saved"), str(target)]) == 1
        assert f"{target}: expected a folder without 'global_step" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_zero_to_fp32_has_written_becomes_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = {"a.weight": torch.randn(3, 5), "a.bias": torch.randn(7)}
    (tmp_path / "theirs").mkdir()
    torch.save(values, tmp_path / "theirs" / "pytorch_model.bin")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values.items())


@dataclass
class _Harmful:
    path: Path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@dataclass
class _Stranger:
    name: str


def test_nothing_in_a_file_is_called(tmp_path: Path) -> None:
    called, file = tmp_path / "called", tmp_path / "file.pt"
    torch.save({"x": _Stranger("a"), "y": torch.ones(2)}, file, pickle_module=pickle)
    found = load_pickle(file)
    assert torch.equal(found["y"], torch.ones(2)) and type(found["x"]) is not _Stranger and found["x"].name == "a"
    torch.save({"x": _Harmful(called), "y": torch.ones(2)}, file, pickle_module=pickle)
    assert "expected a file written by torch.save" in refusal(load_pickle, file, kind=CheckpointError)
    assert not called.exists()


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    said = "expected a DeepSpeed checkpoint, found no folder with *mp_rank_*_model_states.pt"
    assert said in refusal(read_deepspeed, tmp_path, kind=NoCheckpointError)
    said = "with the tag 'x', found global_step12. Choose one by --tag"
    assert said in refusal(read_deepspeed, DATA / "stage0", "x", kind=NoCheckpointError)
    said = "lowtide.json: expected the description of a checkpoint, found files of DeepSpeed: convert them by `lowtide "
    assert said in refusal(CheckpointFolder(DATA / "stage0").open, kind=CheckpointError)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mp_rank_00_model_states.pt").write_text(json.dumps({}))
    assert "expected a file written by torch.save" in refusal(read_deepspeed, tmp_path, "t", kind=CheckpointError)
