"""state_dict: the model's own names and values, tied names and buffers included, on rank 0 alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of

STAGES = (0, 1, 2, 3)


class WithBuffers(models.TinyGPT):
    """Tied weights, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def states(config: dict[str, object]) -> list[tuple[dict[str, Tensor], bool]]:
    """By stage: the state, and whether a second call gives the same and a step leaves both as they were."""
    found = []
    for stage in STAGES:
        torch.manual_seed(0)
        case = Case(WithBuffers, models.token_batch, stage=stage, config=config)
        engine = lowtide.initialize(WithBuffers(), case.as_config())
        state = engine.state_dict()
        again = engine.state_dict()
        is_same = list(state) == list(again) and all(torch.equal(state[name], again[name]) for name in state)
        engine.train_step(share_of(case.global_batch(0, engine.world_size)))
        is_same = is_same and all(torch.equal(state[name], again[name]) for name in state)  # a copy, not a view
        found.append((state, is_same))
        engine.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_names_and_values_are_those_of_the_model(ranks: RankPool, world_size: int, transport: str) -> None:
    torch.manual_seed(0)
    expected = WithBuffers().state_dict()
    first, *others = ranks(world_size, states, {"communication": {"transport": transport}})
    for state, is_same in first:
        assert is_same and list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    for rank_states in others:
        assert [state for state, _ in rank_states] == [{}] * len(STAGES)


def test_a_plain_model_loads_it(ranks: RankPool) -> None:
    state, _ = ranks(2, states, {"bf16": {"enabled": True}})[0][3]
    model: nn.Module = WithBuffers()
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert state["embedding.weight"].dtype == torch.bfloat16 and state["count"].dtype == torch.int64


def saved_by_safetensors(folder: str, stages: tuple[int, ...]) -> list[str]:
    """By stage: what is wrong with what `save_model` writes, and what it raises."""
    from safetensors.torch import load_file, save_model

    found = []
    for stage in stages:
        torch.manual_seed(0)
        case = Case(WithBuffers, models.token_batch, stage=stage)
        engine = lowtide.initialize(WithBuffers(), case.as_config())
        engine.train_step(share_of(case.global_batch(0, engine.world_size)))
        path = f"{folder}/{stage}-{engine.rank}.safetensors"
        try:
            save_model(engine.module, path)
        except lowtide.ReleasedParameterError as error:
            found.append(str(error))
            engine.close()
            continue
        saved, shown = load_file(path), engine.module.state_dict()
        expected = {name: value for name, value in shown.items() if name != "head.weight"}  # tied
        wrong = [name for name, value in expected.items() if not torch.equal(saved[name], value)]
        wrong += sorted(saved.keys() ^ expected.keys())
        params = dict(engine.module.named_parameters())
        wrong += [f"copied {name}" for name, param in params.items() if param.data_ptr() != shown[name].data_ptr()]
        wrong += [f"untied at {stage}"] * (
            shown["head.weight"].untyped_storage()._cdata != shown["embedding.weight"].untyped_storage()._cdata
        )
        engine.train_step(share_of(case.global_batch(1, engine.world_size)))
        wrong += [f"stale {name}" for name, param in params.items() if not torch.equal(param, shown[name])]
        module = engine.module
        engine.close()
        wrong += ["hook"] * len(module._state_dict_hooks)
        found.append(" ".join(wrong))
    return found


def test_safetensors_saves_the_module_where_parameters_are_whole(ranks: RankPool, tmp_path: Path) -> None:
    """The tensors of its state_dict are no parts of a larger storage, which that library refuses; no copies either."""
    for world_size in (1, 2):
        for *whole, released in ranks(world_size, saved_by_safetensors, str(tmp_path), STAGES):
            assert whole == [""] * 3
            assert "is released" in released and "engine.export(folder) on all ranks" in released
