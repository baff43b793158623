"""state_dict: the model's own names and values on rank 0 alone; load_state_dict takes them, at every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import lowtide
from lowtide.zero.sequence import StateError
from tests.engine.plain_weights import Everything, engine_of
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import differences, refusal, settings, share_of

STAGES = (0, 1, 2, 3)
BF16 = {"bf16": {"enabled": True}}


def batch_of(engine: lowtide.Engine) -> tuple[Tensor, ...]:
    return share_of(models.token_batch(1, 2 * engine.world_size))


def states(config: dict[str, object]) -> list[tuple[dict[str, Tensor], list[str]]]:
    """By stage: the state, and what is another in a second call, or after a step has changed the parameters."""
    found = []
    for stage in STAGES:
        with engine_of(stage, config, steps=0) as engine:
            state, again = engine.state_dict(), engine.state_dict()
            kept = {name: value.clone() for name, value in state.items()}
            engine.train_step(batch_of(engine))
            found.append((state, differences(again, state) + differences(state, kept)))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_names_and_values_are_those_of_the_model(ranks: RankPool, world_size: int, transport: str) -> None:
    torch.manual_seed(0)
    expected = Everything().state_dict()
    first, *others = ranks(world_size, states, {"communication": {"transport": transport}})
    for state, changed in first:
        assert list(state) == list(expected) and differences(state, expected) == changed == []
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    for rank_states in others:
        assert [state for state, _ in rank_states] == [{}] * len(STAGES)


def saved_by_safetensors(folder: str) -> list[list[str]]:
    """By stage: what is wrong with what `save_model` writes, or what it raises."""
    found = []
    for stage in STAGES:
        path = f"{folder}/{stage}"
        model = models.tied_gpt()
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        engine = lowtide.initialize(model, settings(stage))
        engine.train_step(batch_of(engine))
        if stage == 3:
            found.append([refusal(save_model, engine.module, path, kind=lowtide.ReleasedParameterError)])
            engine.close()
            break
        path = f"{path}-{engine.rank}"
        save_model(engine.module, path)
        shown = engine.module.state_dict()
        wrong = differences(load_file(path), {name: value for name, value in shown.items() if name != "head.weight"})
        params = dict(engine.module.named_parameters())
        wrong += [f"copied {name}" for name, param in params.items() if param.data_ptr() != shown[name].data_ptr()]
        head, embedding = (shown[name].untyped_storage()._cdata for name in ("head.weight", "embedding.weight"))
        wrong += ["untied"] * (head != embedding)
        engine.train_step(batch_of(engine))
        wrong += [f"stale {name}" for name, param in params.items() if not torch.equal(param, shown[name])]
        module = engine.module
        engine.close()
        found.append([*wrong, *["hook"] * len(module._state_dict_hooks)])
    return found


def test_safetensors_saves_the_module_where_parameters_are_whole(ranks: RankPool, tmp_path: Path) -> None:
    """The tensors of its state_dict are no parts of a larger storage, which that library refuses; no copies either."""
    for world_size in (1, 2):
        for *whole, (released,) in ranks(world_size, saved_by_safetensors, str(tmp_path)):
            assert whole == [[]] * 3
            assert "is released" in released and "engine.export(folder) on all ranks" in released


# -- loading ---------------------------------------------------------------------------------------------------------


def other_state() -> dict[str, Tensor]:
    torch.manual_seed(7)
    state = {name: value.clone() for name, value in Everything().state_dict().items()}
    return {**state, "count": torch.tensor(3)}


def load_and_train(config: dict[str, Any]) -> list[tuple[dict[str, Tensor], float]]:
    """By stage, after loading on rank 0 alone: some values in float32, and the loss of a step."""
    found = []
    for stage in (0, 1, 3):
        with engine_of(stage, config, steps=0) as engine:
            engine.load_state_dict(other_state() if engine.rank == 0 else {})
            values = {name: engine.full(name) for name in ("head.weight", "blocks.1.up.weight", "norm.bias")}
            values["count"] = engine.module.get_buffer("count")
            found.append((values, engine.train_step(batch_of(engine)).loss.item()))
    return found


@pytest.mark.parametrize(("transport", "precision"), [("shared_memory", {}), ("sockets", BF16)])
def test_every_stage_takes_the_values_of_rank_0(ranks: RankPool, transport: str, precision: dict[str, Any]) -> None:
    expected, module = other_state(), Everything()
    module.load_state_dict(expected)
    loss = module(*models.token_batch(1, 4)).item()
    for values, found_loss in ranks(2, load_and_train, {"communication": {"transport": transport}, **precision})[1]:
        assert differences(values, {name: expected[name] for name in values}) == []
        assert found_loss == pytest.approx(loss, rel=2e-2 if precision else 1e-5)


def test_what_does_not_fit_is_told() -> None:
    with lowtide.initialize(torch.nn.Linear(3, 3), settings(3)) as engine:
        weight = engine.state_dict()["weight"]
        text = refusal(engine.load_state_dict, {"weight": weight, "scale": torch.ones(1)})
        words = "engine.load_state_dict(): expected the model's tensors on rank 0, found 1 missing, 1 extra"
        assert text.startswith(f"{words}\n  missing bias: ")
        assert "found 1 misshaped" in refusal(engine.load_state_dict, {"weight": weight, "bias": torch.ones(4)})
        engine.load_state_dict({"bias": torch.ones(3)}, strict=False)
        assert engine.full("bias").tolist() == [1, 1, 1] and torch.equal(engine.full("weight"), weight)


def test_the_optimizer_does_not_give_a_part_of_its_states_for_the_whole() -> None:
    with lowtide.initialize(models.mlp(), settings()) as engine:
        options = engine.optimizer.state_dict()
        assert options["param_groups"][0]["lr"] == 1e-2 and not options["state"]
        groups = list(map(id, engine.optimizer.param_groups))
        engine.optimizer.load_state_dict({**options, "param_groups": [{**options["param_groups"][0], "lr": 0.5}]})
        assert engine.lr == 0.5 and list(map(id, engine.optimizer.param_groups)) == groups
        text = refusal(engine.optimizer.load_state_dict, {"state": {}, "param_groups": []})
        assert "expected 1 parameter groups, found 0" in text
        engine.train_step(models.vector_batch(0, 2))
        instead = "expected engine.save_checkpoint and engine.load_checkpoint, which save and l"
        text = refusal(engine.optimizer.state_dict, kind=StateError)
        assert text.startswith(f"engine.optimizer.state_dict(): {instead}")
        text = refusal(engine.optimizer.load_state_dict, {**options, "state": {0: {}}}, kind=StateError)
        assert text.startswith(f"engine.optimizer.load_state_dict(): {instead}")
        assert engine.train_step(models.vector_batch(0, 2)).loss.isfinite()
