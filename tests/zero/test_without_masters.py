"""bf16 without master weights: the same bits wherever a parameter lies, and as few bytes as it says."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.kernels.weight_rounding import Rounding, rounded_weights
from lowtide.offload import FileStore
from lowtide.optimizers import OPTIMIZERS
from lowtide.zero.gradient import GroupGradient
from tests.engine.test_optimizer_offload import Wide, offloaded
from tests.engine.test_speculative_update import speculative
from tests.kit.models import mlp, short_gpt, tied_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, Outcome, share_of, train, train_all
from tests.zero.apart import apart

FORMS: list[Any] = [False, "kahan", "int8"]
REMAINDERS = {"kahan": "remainder", "int8": "correction"}
NARROW = {**ADAMW, "params": {**ADAMW["params"], "state_dtype": "bf16"}}
SGD = {"type": "sgd", "params": {"lr": 0.125}}


def case_of(masters: bool | str, **config: Any) -> Case:
    bf16 = {"enabled": True, "masters": masters}
    config = {"bf16": bf16, "optimizer": NARROW, "seed": 5, **config}
    return Case(short_gpt, token_batch, clip=0.5, steps=2, config=config)


def routed(case: Case, transport: str) -> Case:
    return case.at(case.stage, config={"communication": {"transport": transport}})


def places(case: Case, folder: Path) -> list[Case]:
    """Every stage and transport, and each place where parameters and states may rest, at one stage or another."""
    zero = {"offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    in_files = offloaded(case.at(3, config={"zero_optimization": zero, "communication": {"transport": "auto"}}), folder)
    return [
        *(routed(case.at(stage), ("sockets", "shared_memory")[stage % 2]) for stage in range(4)),
        offloaded(case.at(0), folder),
        case.at(2, config={"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
        in_files,
        speculative(case.at(1), "cpu", folder),
        speculative(case.at(3), "nvme", folder),
    ]


def assert_alike(outcomes: Sequence[Outcome], what: object) -> None:
    first, *others = outcomes
    for number, other in enumerate(others):
        assert other.differences(first) == [], (what, number)


@pytest.mark.parametrize("masters", FORMS)
def test_stages_routes_and_places_have_the_same_bits(ranks: RankPool, tmp_path: Path, masters: bool | str) -> None:
    """A remainder rests where the states do: "kahan" is at every third place, "int8" at all."""
    cases = places(case_of(masters), tmp_path)
    assert_alike(ranks(2, train_all, cases[::3] if masters == "kahan" else cases)[0], masters)


@pytest.mark.parametrize("masters", [False, "int8"])
def test_so_have_updates_in_the_backward_on_the_host_and_those_that_are_late(
    ranks: RankPool, tmp_path: Path, masters: bool | str
) -> None:
    case = case_of(masters).at(1, clip=0.0, steps=3)
    in_backward = {"zero_optimization": {"update_in_backward": True}}
    late = {"device": "cpu", "overlap": "delayed"}
    delayed = [case.at(stage, config={"zero_optimization": {"offload_optimizer": late}}) for stage in (1, 2)]
    on_host = offloaded(case.at(2), tmp_path)
    plain, early, *after = ranks(2, train_all, [case, case.at(3, config=in_backward), *delayed])[0]
    assert_alike([plain, early], "in backward")
    assert_alike(after, "delayed")
    there, *late_there = ranks(2, apart, train_all, [on_host, *delayed])[0]
    assert_alike([plain, there], "on the host")
    assert_alike([after[0], *late_there], "delayed, on the host")


def same_rows(step: int, rows: int) -> tuple[Tensor, ...]:
    """Each rank has the same two rows: the mean of their gradients is exact."""
    return tuple(torch.cat([one] * (rows // 2)) for one in token_batch(step, 2))


def assert_alike_on_any_ranks(ranks: RankPool, configs: Mapping[Any, Mapping[str, Any]]) -> None:
    """Trainings with each of these configs, at different stages."""
    cases = [Case(short_gpt, same_rows, steps=2, config=config) for config in configs.values()]
    found = [ranks(size, train_all, [case.at(stage) for case in cases])[0] for size, stage in ((1, 0), (4, 3))]
    for what, outcomes in zip(configs, zip(*found, strict=True), strict=True):
        for other in outcomes[1:]:
            other.norms = outcomes[0].norms  # whose sums are of other parts
        assert_alike(outcomes, what)


def test_any_number_of_ranks_has_the_same_bits(ranks: RankPool) -> None:
    assert_alike_on_any_ranks(ranks, {masters: case_of(masters).config for masters in FORMS})


def test_every_optimizer(ranks: RankPool) -> None:
    names = [name for name, record in OPTIMIZERS.items() if not record.sends_signs]  # the others need masters
    cases = [case_of(False, optimizer={"type": name}).at(stage) for name in names for stage in (1, 3)]
    outcomes = ranks(2, train_all, cases)[0]
    for name, first, other in zip(names, outcomes[::2], outcomes[1::2], strict=True):
        assert_alike([first, other], name)


def go_on(case: Case, folder: Path, first: int, end: int, looks: bool = True) -> dict[str, Tensor]:
    """Takes the steps from a checkpoint on, where there is one; all values in the end, on rank 0, where it looks."""
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        if first:
            engine.load_checkpoint(folder)
        for step in range(first, end):
            engine.train_step(share_of(case.global_batch(step, engine.data_size)))
        if end > first:
            engine.save_checkpoint(folder)
        if not looks:
            return {}
        rest = REMAINDERS.get(case.config["bf16"]["masters"])
        states = ("exp_avg", "exp_avg_sq", *([rest] if rest else []))
        names = [name for name, _ in engine.named_parameters()]
        found = {f"{name} {state}": engine.full(name, state) for name in names for state in (None, *states)}
        return {key: value for key, value in found.items() if engine.rank == 0}


def go_on_all(trips: Sequence[tuple[Case, Path]], first: int, end: int, looks: bool = True) -> list[dict[str, Tensor]]:
    return [go_on(case, folder, first, end, looks) for case, folder in trips]


def test_a_resume_on_other_ranks_draws_what_the_run_would_have_drawn(ranks: RankPool, tmp_path: Path) -> None:
    cases = {tmp_path / str(masters): Case(short_gpt, same_rows, config=case_of(masters).config) for masters in FORMS}
    whole = ranks(1, go_on_all, [(case, folder / "whole") for folder, case in cases.items()], 0, 3)[0]
    ranks(1, go_on_all, [(case.at(3), folder) for folder, case in cases.items()], 0, 1, looks=False)
    parts = ranks(2, go_on_all, [(offloaded(case.at(1), tmp_path), folder) for folder, case in cases.items()], 1, 3)[0]
    for masters, expected, found in zip(FORMS, whole, parts, strict=True):
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == [], masters


def values_of(gradient: GroupGradient) -> Tensor:
    assert gradient.shard is not None
    return gradient.shard.clone()


def step_by_hand() -> None:
    torch.manual_seed(0)
    config = Case(mlp, vector_batch, config=case_of(False, optimizer=SGD).config).as_config()
    with lowtide.initialize(mlp(), config) as engine:
        for step in (1, 2):
            before = [shard.group.shard.float() for shard in engine.optimizer.shards]
            engine.backward(engine(*share_of(vector_batch(step, 2 * engine.world_size))))
            gradients = [values_of(shard.gradient) for shard in engine.optimizer.shards]
            engine.step()
            for shard, weight, gradient in zip(engine.optimizer.shards, before, gradients, strict=True):
                group = shard.group
                noise = Rounding.of(5, group.plan.name, group.own.start).noise(weight.numel(), step, weight.device)
                exact = weight - 0.125 / engine.world_size * gradient
                assert torch.equal(group.shard.float(), rounded_weights(exact, noise))


def test_a_step_is_the_update_in_float32_rounded_by_number(ranks: RankPool) -> None:
    ranks(2, step_by_hand)


def bytes_of_each(masters: bool | str, state_dtype: str, sums: str | None, in_backward: bool = False) -> float:
    config = {
        "steps_per_print": 0,
        "bf16": {"enabled": True, "masters": masters},
        "optimizer": {"type": "adamw", "params": {"state_dtype": state_dtype}},
        "data_types": {"grad_accum_dtype": sums},
        "zero_optimization": {"stage": 2, "update_in_backward": in_backward},
    }
    with lowtide.initialize(Wide(64), config) as engine:
        engine.backward(engine(*share_of(vector_batch(0, 2 * engine.world_size))))
        engine.step()
        engine.backward(engine(*share_of(vector_batch(1, 2 * engine.world_size))))
        memory = engine.memory()
        shards = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
        engine.step()
        return (memory.gradient_bytes + memory.optimizer_bytes) / shards + 2


def test_bytes_of_a_parameter(ranks: RankPool) -> None:
    """Gradient and states, of a shard's element; and the parameter's own two."""
    expected: dict[tuple[Any, ...], float]
    expected = {(True, "fp32", None): 18, (False, "bf16", "bf16"): 8, ("kahan", "bf16", "bf16"): 10}
    expected["int8", "int8", "bf16"] = 7 + 2 * 4 / 256  # a scale for 256 elements of each state
    expected["int8", "int8", "bf16", True] = 5 + 2 * 4 / 256
    for arguments, nbytes in expected.items():
        assert ranks(2, bytes_of_each, *arguments) == [nbytes] * 2, arguments


def traffic_of_each(masters: bool | str, state_dtype: str, path: str) -> dict[str, float]:
    """Bytes of a shard's element that go from and to files in a step."""
    config = {
        "steps_per_print": 0,
        "bf16": {"enabled": True, "masters": masters},
        "optimizer": {"type": "adamw", "params": {"state_dtype": state_dtype}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": path}},
    }
    moved: Counter[str] = Counter()
    plain = {"load": FileStore.load, "save": FileStore.save}

    def counted(verb: str, store: FileStore, key: str, values: Tensor) -> Any:
        moved[verb] += values.nbytes
        return plain[verb](store, key, values)

    with lowtide.initialize(Wide(256), config) as engine:
        batch = share_of(vector_batch(0, 2 * engine.world_size))
        engine.train_step(batch)
        with ExitStack() as stack:
            for verb in plain:
                stack.enter_context(patch.object(FileStore, verb, partialmethod(partial(counted, verb))))
            engine.train_step(batch)
        shards = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
        return {verb: moved[verb] / shards for verb in plain}


def test_bytes_from_and_to_files(ranks: RankPool, tmp_path: Path) -> None:
    expected: dict[tuple[bool | str, str], float]
    expected = {(True, "fp32"): 12, (False, "bf16"): 4, ("int8", "int8"): 3 + 2 * 4 / 256}
    for arguments, nbytes in expected.items():
        for moved in ranks(2, traffic_of_each, *arguments, str(tmp_path)):
            assert moved["load"] == moved["save"], arguments
            assert 0 <= moved["load"] - nbytes < 0.005, arguments  # tensors of a chunk begin at multiples


def test_a_checkpoint_goes_on_with_another_form(ranks: RankPool, tmp_path: Path) -> None:
    """Values of bfloat16 are exact, others the nearest; states are as they were."""
    trips: list[tuple[bool | str, bool | str]]
    trips = [(True, False), (False, True), (True, "kahan"), ("kahan", False), ("kahan", "int8"), ("int8", True)]
    forms: list[bool | str] = [True, *FORMS]
    before = ranks(2, go_on_all, [(case_of(saved).at(1), tmp_path / str(saved)) for saved in forms], 0, 2)[0]
    after = ranks(2, go_on_all, [(case_of(loaded).at(3), tmp_path / str(saved)) for saved, loaded in trips], 2, 2)[0]
    for (saved, loaded), found in zip(trips, after, strict=True):
        for name, value in before[forms.index(saved)].items():
            if name.endswith("None"):
                assert torch.equal(found[name], value.bfloat16().float()), (saved, loaded, name)
            elif not name.endswith(tuple(REMAINDERS.values())):
                assert torch.equal(found[name], value), (saved, loaded, name)
        assert not any(value.any() for name, value in found.items() if name.endswith(tuple(REMAINDERS.values())))


def write_and_look(forms: Sequence[tuple[str, dict[str, Any], str]]) -> None:
    for form in forms:
        write_and_look_at(*form)


def write_and_look_at(masters: str, place: dict[str, Any], state_dtype: str) -> None:
    params = {**ADAMW["params"], "state_dtype": state_dtype}
    optimizer, rest = {**ADAMW, "params": params}, REMAINDERS[masters]
    config = case_of(masters, optimizer=optimizer, zero_optimization={"stage": 3, **place}).at(3).as_config()
    with lowtide.initialize(short_gpt(), config) as engine:
        for step in range(2):
            engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
        names = [name for name, _ in engine.named_parameters()]
        written, changed, kept = names[1], names[2], names[3]
        assert all(engine.full(name, rest).any() for name in (written, changed, kept))
        with pytest.raises(ValueError, match="the parameter's shape"):
            engine.set_full(kept, torch.zeros(1))  # changes nothing
        engine.set_full(written, torch.full_like(engine.full(written), 0.5))
        parameter = dict(engine.module.named_parameters())[changed]
        with torch.no_grad(), engine.gathered(parameter, modify=True):
            parameter.fill_(0.25)
        assert [engine.full(name, rest).any().item() for name in (written, changed, kept)] == [
            False,
            False,
            True,
        ]
        assert (engine.full(written) == 0.5).all() and engine.full(written).dtype == torch.float32


def test_values_that_are_written_lack_nothing(ranks: RankPool, tmp_path: Path) -> None:
    in_files = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    forms = (("kahan", "bf16"), ("int8", "int8"))
    ranks(2, write_and_look, [(masters, place, dtype) for masters, dtype in forms for place in ({}, in_files)])


def weights_of_forms() -> list[dict[str, Tensor]]:
    return [weights_here(masters) for masters in FORMS]


def weights_here(masters: bool | str) -> dict[str, Tensor]:
    """What this rank computes with, after three steps of a pipeline whose first and last stage share a weight."""
    config = case_of(masters, parallel={"pipeline": 2}, gradient_accumulation_steps=2).config
    torch.manual_seed(0)
    with lowtide.initialize(
        tied_gpt(), Case(tied_gpt, token_batch, accumulation=2, config=config).as_config()
    ) as engine:
        for step in range(3):
            engine.train_step(token_batch(step, 4))
        groups = [shard.group for shard in engine.optimizer.shards]
        return {name: param.detach().clone() for one in groups for name, param in one.plan.params}


def test_copies_on_two_stages_stay_equal(ranks: RankPool) -> None:
    for first, last in zip(*ranks(2, weights_of_forms), strict=True):
        (name,) = first.keys() & last.keys()
        assert torch.equal(first[name], last[name])


def averages_shown() -> None:
    with lowtide.initialize(short_gpt(), case_of(False).at(2).as_config()) as engine:
        engine.ema(0.9)
        for step in range(3):
            engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
        shards, averages = engine.optimizer.shards, engine.optimizer.averages
        assert averages is not None
        kept = [averages.of(s, p).clone() for s in shards for p in s.param_shards]
        weights = [s.group.shard.clone() for s in shards]
        assert all(one.dtype == torch.float32 for one in kept)
        with engine.ema_weights():
            shown = [s.group.shard[p.offset_in_shard :][: p.numel].float() for s in shards for p in s.param_shards]
            for average, value in zip(kept, shown, strict=True):
                assert ((average - value).abs() <= average.abs() * 2.0**-8).all()
        assert all(map(torch.equal, [s.group.shard for s in shards], weights))
        assert all(map(torch.equal, [averages.of(s, p) for s in shards for p in s.param_shards], kept))


def test_averages_are_in_float32_and_come_back_bit_by_bit(ranks: RankPool) -> None:
    ranks(2, averages_shown)


def train_own(cases: Sequence[Case]) -> list[Outcome]:
    return [train(case, optimizer=torch.optim.Rprop) for case in cases]


def test_a_class_of_the_callers_own_is_rounded_alike(ranks: RankPool) -> None:
    case = case_of(False, optimizer=None)
    outcomes = ranks(2, train_own, [routed(case.at(stage), "sockets") for stage in (0, 2, 3)])[0]
    assert_alike(outcomes, "Rprop")
    assert outcomes[0].norms != ranks(2, train_own, [case_of(True, optimizer=None)])[0][0].norms


@pytest.mark.parametrize("masters", REMAINDERS)
def test_remainders_need_an_optimizer_that_is_known(masters: str) -> None:
    with pytest.raises(ValueError, match=rf'bf16.masters: "{masters}" needs an optimizer .*, found Rprop; use an'):
        train_own([case_of(masters, optimizer=None)])
