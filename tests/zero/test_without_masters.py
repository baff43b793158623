"""bf16 without master weights: the same bits wherever a parameter lies, and as few bytes as it says."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowtide.kernels.weight_rounding import Rounding, rounded_weights
from lowtide.offload import FileStore
from lowtide.optimizers import OPTIMIZERS
from tests.engine.test_optimizer_offload import Wide, offloaded
from tests.kit.models import mlp, short_gpt, tied_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import ADAMW, Case, assert_alike, refusal, share_of, take_step, train, train_all, trained

FORMS: list[Any] = [False, "kahan", "int8"]
REMAINDERS = {"kahan": "remainder", "int8": "correction"}


def adamw(state_dtype: str = "bf16") -> dict[str, Any]:
    return {**ADAMW, "params": {**ADAMW["params"], "state_dtype": state_dtype}}


def case_of(masters: bool | str, **config: Any) -> Case:
    bf16 = {"enabled": True, "masters": masters}
    return Case(
        short_gpt, token_batch, clip=0.5, steps=2, config={"bf16": bf16, "optimizer": adamw(), "seed": 5, **config}
    )


OF_LAWS = ("adamw", "sgd", "lamb", "muon", "adafactor")


def test_every_optimizer(ranks: RankPool) -> None:
    """Those that tests/laws do not ask, and that have no kernel; and one that sends signs needs masters."""
    has_other_tests = {name for name, record in OPTIMIZERS.items() if record.sends_signs or record.coefficients}
    names = [name for name in OPTIMIZERS if name not in has_other_tests | {*OF_LAWS}]
    cases = [case_of(False, optimizer={"type": name}).at(stage) for name in names for stage in (1, 3)]
    outcomes = ranks(2, train_all, cases)[0]
    for name, first, other in zip(names, outcomes[::2], outcomes[1::2], strict=True):
        assert_alike([first, other], name)


def test_a_class_of_the_callers_own_is_rounded_alike(ranks: RankPool) -> None:
    plain = case_of(True, optimizer=None)
    cases = [case_of(False, optimizer=None, communication={"transport": "sockets"}).at(stage) for stage in (0, 2, 3)]
    *outcomes, other = ranks(2, train_all, [*cases, plain], optimizer=torch.optim.Rprop)[0]
    assert_alike(outcomes)
    assert outcomes[0].norms != other.norms


@pytest.mark.parametrize("masters", REMAINDERS)
def test_remainders_need_an_optimizer_that_is_known(masters: str) -> None:
    text = refusal(train, case_of(masters, optimizer=None), optimizer=torch.optim.Rprop)
    assert text.startswith(f'bf16.masters: "{masters}" needs an optimizer ') and ", found Rprop; use an" in text


@on_ranks(2)
def test_a_step_is_the_update_in_float32_rounded_by_number() -> None:
    sgd = {"type": "sgd", "params": {"lr": 0.125}}
    with trained(Case(mlp, vector_batch, config=case_of(False, optimizer=sgd).config), 0) as engine:
        for step in (1, 2):
            before = [shard.group.shard.float() for shard in engine.optimizer.shards]
            engine.backward(engine(*share_of(vector_batch(step, 2 * engine.world_size))))
            gradients = [shard.gradient.shard.clone() for shard in engine.optimizer.shards]  # type: ignore[union-attr]
            engine.step()
            for shard, weight, gradient in zip(engine.optimizer.shards, before, gradients, strict=True):
                group = shard.group
                noise = Rounding.of(5, group.plan.name, group.own.start).noise(weight.numel(), step, weight.device)
                exact = weight - 0.125 / engine.world_size * gradient
                assert torch.equal(group.shard.float(), rounded_weights(exact, noise))


# -- bytes ------------------------------------------------------------------------------------------------------------


def wide(width: int, masters: bool | str, state_dtype: str, **config: Any) -> Case:
    optimizer = {"type": "adamw", "params": {"state_dtype": state_dtype}}
    return Case(partial(Wide, width), vector_batch, config=case_of(masters, optimizer=optimizer, **config).config)


@pytest.mark.parametrize(
    ("masters", "dtypes", "in_backward", "expected"),
    [
        (True, ("fp32", None), False, 18),
        (False, ("bf16", "bf16"), False, 8),
        ("kahan", ("bf16", "bf16"), False, 10),
        ("int8", ("int8", "bf16"), False, 7 + 2 * 4 / 256),  # a scale for 256 elements of each state
        ("int8", ("int8", "bf16"), True, 5 + 2 * 4 / 256),
    ],
)
@on_ranks(2)
def test_bytes_of_a_parameter(masters: bool | str, dtypes: tuple[str, str], in_backward: bool, expected: float) -> None:
    """Gradient and states, of a shard's element; and the parameter's own two. dtypes: of states, and of sums."""
    zero = {"update_in_backward": in_backward}
    case = wide(64, masters, dtypes[0], zero_optimization=zero, data_types={"grad_accum_dtype": dtypes[1]})
    with trained(case.at(2), 1) as engine:
        engine.backward(engine(*share_of(vector_batch(1, 2 * engine.world_size))))
        memory = engine.memory()
        shards = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
        engine.step()
    assert (memory.gradient_bytes + memory.optimizer_bytes) / shards + 2 == expected


@pytest.mark.parametrize(
    ("masters", "state_dtype", "expected"), [(True, "fp32", 12), (False, "bf16", 4), ("int8", "int8", 3 + 2 * 4 / 256)]
)
@on_ranks(2)
def test_bytes_from_and_to_files(tmp_path: Path, masters: bool | str, state_dtype: str, expected: float) -> None:
    """expected: bytes of a shard's element that go from and to files in a step."""
    case = offloaded(wide(256, masters, state_dtype).at(2), tmp_path)
    moved: Counter[str] = Counter()
    load, save = FileStore.load, FileStore.save

    def counted_load(store: FileStore, key: str, out: Tensor) -> Any:
        moved["load"] += out.nbytes
        return load(store, key, out)

    def counted_save(store: FileStore, key: str, values: Tensor) -> Any:
        moved["save"] += values.nbytes
        return save(store, key, values)

    with trained(case, 1) as engine:
        with patch.object(FileStore, "load", counted_load), patch.object(FileStore, "save", counted_save):
            take_step(engine, case, 0)
        shards = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
    assert moved["load"] == moved["save"]
    assert 0 <= moved["load"] / shards - expected < 0.005  # tensors of a chunk begin at multiples


# -- what is saved, written, shown ------------------------------------------------------------------------------------


def go_on(trips: Sequence[tuple[Case, Path]], first: int, end: int, looks: bool = True) -> list[dict[str, Tensor]]:
    """Takes steps from a checkpoint on, where there is one; values in the end, on rank 0, where it looks.

    They are those of each third parameter: of matrices and vectors, in the block and beside it.
    """
    results = []
    for case, folder in trips:
        with trained(case, 0) as engine:
            if first:
                engine.load_checkpoint(folder)
            for step in range(first, end):
                take_step(engine, case, step)
            if end > first:
                engine.save_checkpoint(folder)
            masters = case.config.get("bf16", {}).get("masters")
            states: list[str | None] = [None] if masters is None else [None, "exp_avg", "exp_avg_sq"]
            states += [REMAINDERS[masters]] if masters in REMAINDERS else []
            names = [name for name, _ in engine.named_parameters()][::3] if looks else []
            found = {f"{name} {state}": engine.full(name, state) for name in names for state in states}
            results.append(found if engine.rank == 0 else {})
    return results


def test_a_checkpoint_goes_on_with_another_form(ranks: RankPool, tmp_path: Path) -> None:
    """Values of bfloat16 are exact, others the nearest; states are as they were."""
    trips: list[tuple[bool | str, bool | str]]
    trips = [(True, False), (False, True), (True, "kahan"), ("kahan", False), ("kahan", "int8"), ("int8", True)]
    forms: list[bool | str] = [True, *FORMS]
    before = ranks(2, go_on, [(case_of(saved).at(1), tmp_path / str(saved)) for saved in forms], 0, 2)[0]
    after = ranks(2, go_on, [(case_of(loaded).at(3), tmp_path / str(saved)) for saved, loaded in trips], 2, 2)[0]
    rests = tuple(REMAINDERS.values())
    for (saved, loaded), found in zip(trips, after, strict=True):
        for name, value in before[forms.index(saved)].items():
            if not name.endswith(rests):
                expected = value.bfloat16().float() if name.endswith("None") else value
                assert torch.equal(found[name], expected), (saved, loaded, name)
        assert not any(value.any() for name, value in found.items() if name.endswith(rests))


@on_ranks(2)
def test_values_that_are_written_lack_nothing(tmp_path: Path) -> None:
    """The remainder of what was written is zero, and that of another parameter is not."""
    cases = [
        (case_of(m, optimizer=adamw(dtype)).at(3), REMAINDERS[m]) for m, dtype in (("kahan", "bf16"), ("int8",) * 2)
    ]
    for case, rest in [*cases, *((offloaded(case, tmp_path), rest) for case, rest in cases)]:
        with trained(case, 2) as engine:
            _, written, changed, kept, *_ = (name for name, _ in engine.named_parameters())
            assert all(engine.full(name, rest).any() for name in (written, changed, kept))
            text = refusal(engine.set_full, kept, torch.zeros(1))  # changes nothing
            assert "the parameter's shape" in text
            engine.set_full(written, torch.full_like(engine.full(written), 0.5))
            parameter = engine.module.get_parameter(changed)
            with torch.no_grad(), engine.gathered(parameter, modify=True):
                parameter.fill_(0.25)
            assert [bool(engine.full(name, rest).any()) for name in (written, changed, kept)] == [False, False, True]
            assert (engine.full(written) == 0.5).all() and engine.full(written).dtype == torch.float32


def weights_here() -> list[dict[str, Tensor]]:
    """What this rank computes with, after three steps of a pipeline whose first and last stage share a weight."""
    found = []
    for masters in FORMS:
        config = case_of(masters, parallel={"pipeline": 2}).config
        with trained(Case(tied_gpt, token_batch, accumulation=2, config=config), 3) as engine:
            groups = [shard.group for shard in engine.optimizer.shards]
            found.append({name: param.detach().clone() for one in groups for name, param in one.plan.params})
    return found


def test_copies_on_two_stages_stay_equal(ranks: RankPool) -> None:
    for first, last in zip(*ranks(2, weights_here), strict=True):
        (name,) = first.keys() & last.keys()
        assert torch.equal(first[name], last[name])


@on_ranks(2)
def test_averages_are_in_float32_and_come_back_bit_by_bit() -> None:
    with trained(case_of(False).at(2), 0) as engine:
        engine.ema(0.9)
        for step in range(3):
            take_step(engine, case_of(False), step)
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
