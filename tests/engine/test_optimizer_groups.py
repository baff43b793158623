"""Groups over some parameters, over frozen ones, and groups that are added between steps: the numbers of torch."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lowtide
from lowtide.engine.blueprint.optimizer_plan import OptimizerPlan
from lowtide.engine.config.config import Config
from lowtide.offload.block_file import BlockFile
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, differences, refusal, settings

STEPS = 5
LATE = 1  # the first step with another group
CASE = Case(models.mlp_float64, models.vector_batch_float64, config={"optimizer": None})
SOCKETS = {"communication": {"transport": "sockets"}}
Make = Callable[[Any], torch.optim.Optimizer]
adamw: Make = partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
rmsprop: Make = partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1)


Before = Callable[[Any, int], None]  # what is done to an optimizer before each step


def nothing(*given: Any) -> None: ...


def some(model: Any) -> list[dict[str, Any]]:
    """Of the blocks, and the bias of the last layer: in two groups, and not in the model's order."""
    return [{"params": [model.last.bias], "lr": 0.1}, {"params": list(model.layers.parameters())[::-1]}]


def of_all(model: Any) -> list[Tensor]:
    return list(model.parameters())


def unfreeze(model: Any, optimizer: Any = None, step: int = 0) -> None:
    """A block a step; then one is frozen again."""
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index <= step and not (index == 0 and step == 4))


def freeze_all_but_last(model: Any) -> None:
    model.requires_grad_(False)
    model.last.requires_grad_(True)


def adding(model: Any) -> Before:
    """A whole block, then parts of two units; the parameters are those that the model has now."""
    groups: dict[int, list[dict[str, Any]]] = {
        LATE: [{"params": list(model.layers[0].parameters())}],
        LATE + 1: [{"params": [model.layers[1].weight, model.first.bias], "lr": 0.05}, {"params": model.first.weight}],
    }

    def add(optimizer: Any, step: int) -> None:
        for group in groups.get(step, []):
            for param in [group["params"]] if isinstance(group["params"], Tensor) else group["params"]:
                param.requires_grad_(True)
            optimizer.add_param_group(dict(group))

    return add


# What is done to a model before it gets an optimizer, the parameters of that, and what is done before each step.
KINDS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any], Callable[[Any], Before]]] = {
    "some": (nothing, some, lambda model: nothing),
    "frozen": (unfreeze, of_all, lambda model: partial(unfreeze, model)),
    "late": (freeze_all_but_last, lambda model: list(model.last.parameters()), adding),
}


@dataclass(frozen=True)
class Row:
    kind: str
    case: Case = CASE
    make: Make = adamw
    ema: bool = False

    def made(self) -> tuple[Any, Any, Before]:
        """A model, its optimizer, and what is done before each step."""
        torch.manual_seed(0)
        prepare, choose, changing = KINDS[self.kind]
        model = self.case.build()
        prepare(model)
        return model, self.make(choose(model)), changing(model)

    def started(self) -> tuple[lowtide.Engine, Before]:
        model, optimizer, before_step = self.made()
        engine = lowtide.initialize(model, self.case.as_config(), optimizer=optimizer)
        if self.ema:
            engine.ema(0.5)
        return engine, before_step


def train(row: Row, folder: Path | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and the state at the end. folder: of checkpoints, from each of which another engine goes on."""
    (engine, before_step), norms = row.started(), []
    for step in range(STEPS):
        if folder is not None and step in (LATE + 1, LATE + 2):
            engine.save_checkpoint(folder)
            engine.close()
            engine, before_step = row.started()
            for earlier in range(step if row.kind == "late" else 0):
                before_step(engine.optimizer, earlier)
            engine.load_checkpoint(folder)
        before_step(engine.optimizer, step)
        norms.append(engine.train_step(row.case.share(engine, step)).grad_norm.item())
    with engine.ema_weights() if row.ema else nullcontext():
        state = engine.state_dict()
    engine.close()
    return norms, state


def train_all(rows: list[Row], folder: Path | None = None) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(row, None if folder is None else folder / str(index)) for index, row in enumerate(rows)]


def train_plainly(row: Row, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    (model, optimizer, before_step), norms = row.made(), []
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        before_step(optimizer, step)
        model.zero_grad()
        model(*row.case.global_batch(step, world_size)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), row.case.clip or torch.inf).item())
        optimizer.step()
        averaged.update_parameters(model)
    return norms, dict((averaged.module if row.ema else model).state_dict())


def check(ranks: RankPool, rows: list[Row], world_size: int, folder: Path | None = None, shares: int = 0) -> None:
    """shares: how many parts of a batch the ranks have, where these are not as many as ranks."""
    for row, found in zip(rows, ranks(world_size, train_all, rows, folder)[0], strict=True):
        expected = train_plainly(row, shares or world_size)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{row}: {{}}".format)


def at(stage: int, config: dict[str, Any] | None = None, **zero: Any) -> Case:
    return CASE.at(stage, config={"zero_optimization": zero, **(config or {})})


def stages(kind: str, makes: tuple[Make, Make], clip: float) -> list[Row]:
    """Every stage, with two optimizers in turn; adamw's gradients are clipped."""
    cases = [at(0), at(1).at(1, accumulation=2), at(2, SOCKETS).at(2, accumulation=2), at(3, SOCKETS)]
    return [
        Row(kind, case.at(case.stage, clip=clip if make is adamw else 0.0), make)
        for case, make in zip(cases, makes * 2, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_train_as_by_torch(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """What is in no group counts in the norm, as for torch's `clip_grad_norm_(model.parameters())`, and stays."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    speculative, makes = {**nvme, "overlap": "speculative"}, (rmsprop, adamw) if kind == "frozen" else (adamw, rmsprop)
    elsewhere = {
        "some": [at(3, offload_optimizer=nvme), at(3, offload_param=nvme), at(2, update_in_backward=True)],
        "frozen": [at(3)],
        "late": [
            at(3, offload_optimizer=speculative),
            at(3, offload_param=nvme),
            at(3, update_in_backward=True),
        ],
    }
    check(ranks, [*stages(kind, makes, 0.05), *(Row(kind, case) for case in elsewhere[kind])], 2)


def test_groups_that_come_later_over_several_axes(ranks: RankPool) -> None:
    cases = [at(2, shard_size=2).at(2, clip=0.05), at(3, SOCKETS, zero_hpz_partition_size=2)]
    check(ranks, [Row("late", case) for case in cases], 4)


def test_checkpoints_of_all(ranks: RankPool, tmp_path: Path) -> None:
    """Late groups: of an engine that has the same ones, in the same order, whenever it has got them."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    rows = [
        Row("some", at(3), rmsprop),
        Row("frozen", at(0)),
        Row("late", at(3, SOCKETS, offload_optimizer=nvme)),
        Row("late", at(1), rmsprop, ema=True),
    ]
    check(ranks, rows, 2, tmp_path)


def test_groups_that_come_later_in_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    """The caller has the parameters of all stages from the model that he gave."""
    for stage, folder in ((3, None), (0, tmp_path)):
        case = at(stage, {"parallel": {"pipeline": 2}}).at(stage, accumulation=2, clip=0.05)
        check(ranks, [Row("late", case)], 2, folder, shares=1)


@on_ranks(2)
def test_late_masters_begin_with_what_is_computed_with(tmp_path: Path) -> None:
    """The same bits at every stage, wherever masters and states rest, and with updates that come late."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    half, delayed = {"bf16": {"enabled": True}}, {"overlap": "delayed", "delay_after_steps": 1}
    at_once = at(0, half), at(2, half), at(3, half | SOCKETS, offload_optimizer=nvme, offload_param=nvme)
    late = (
        at(1, half, offload_optimizer={"device": "cpu", **delayed}),
        at(3, half | SOCKETS, offload_optimizer={**nvme, **delayed}),
    )
    for cases in (at_once, late):
        (norms, state), *others = (train(Row("late", case)) for case in cases)
        for found, values in others:
            assert found == norms and differences(values, state) == []


def halve(step: int) -> float:
    return 0.5**step


def rates(model: Any, engine: lowtide.Engine, before: Callable[[], Any] = nothing) -> list[float]:
    """Of all groups before each step; a group comes before the third. before: is called before that."""
    found = []
    for step in range(4):
        if step == 2:
            before()
            engine.optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.8})
        found.append([group["lr"] for group in engine.optimizer.param_groups])
        engine.train_step(models.vector_batch_float64(step, 2))
    return list(chain(*found))


@pytest.mark.parametrize(
    ("config", "make", "expected"),
    [
        (
            {"scheduler": {"type": "linear", "params": {"total_num_steps": 10}}},
            None,
            [0.1, 0.09, 0.08, 0.64, 0.07, 0.56],
        ),
        ({}, partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), [0.1, 0.05, 0.025, 0.8, 0.0125, 0.4]),
    ],
)
def test_a_schedule_that_goes_on_from_each_rate_takes_a_group_up(config: Any, make: Any, expected: list[float]) -> None:
    model, *_ = Row("late").made()
    config = settings(optimizer={"type": "sgd", "params": {"lr": 0.1}}, **config)
    with lowtide.initialize(model, config, lr_scheduler=make) as engine:
        assert rates(model, engine) == pytest.approx(expected)


def test_a_scheduler_with_a_list_refuses_a_group_before_anything_is_changed() -> None:
    model, *_ = Row("late").made()
    make = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=halve)
    config = settings(optimizer={"type": "sgd", "params": {"lr": 0.1}})
    with lowtide.initialize(model, config, lr_scheduler=make) as engine:
        scheduler: Any = engine.lr_scheduler
        text = refusal(rates, model, engine)
        assert "expected an lr_scheduler that works with a new group, found that LambdaLR" in text
        assert len(engine.optimizer.param_groups) == 1 and scheduler.last_epoch == 2

        def extend() -> None:
            scheduler.base_lrs.append(0.8)
            scheduler.lr_lambdas.append(halve)

        assert rates(model, engine, extend)[2:] == pytest.approx([0.1 / 16, 0.8, 0.1 / 32, 0.8 / 32])


OTHER_OPTIONS = "expected options of adamw with the states of the first group, found {'amsgrad': True"


@pytest.mark.parametrize(
    ("choose", "kind", "words"),
    [
        (lambda model: {"params": []}, ValueError, "expected parameters of the model, found none"),
        (lambda model: {"params": nn.Parameter(torch.zeros(2))}, ValueError, "found a Parameter of another module"),
        (lambda model: {"params": model.last.weight}, ValueError, "in no group, found 'last.weight' of group 0"),
        (lambda model: {"params": [model.first.bias] * 2}, ValueError, "in no group, found 'first.bias' of group 1"),
        (
            lambda model: {"params": {model.first.bias}},
            TypeError,
            "expected parameters in the same order on all ranks, found a set",
        ),
        (lambda model: {"params": model.table}, ValueError, "of floating-point numbers, found 'table' of torch.int64"),
        (lambda model: {"params": model.first.bias, "amsgrad": True}, ValueError, OTHER_OPTIONS),
    ],
)
def test_what_cannot_be_in_a_group(choose: Any, kind: type[Exception], words: str) -> None:
    model, optimizer, _ = Row("late").made()
    model.table = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with lowtide.initialize(model, CASE.as_config(), optimizer=optimizer) as engine:
        assert words in refusal(engine.optimizer.add_param_group, choose(model), kind=kind)
        assert len(engine.optimizer.param_groups) == 1
        engine.train_step(models.vector_batch_float64(0, 2))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (partial(torch.optim.SGD, lr=0.1), {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"maximize": True}),
    ],
)
def test_an_option_that_needs_another_rule_or_state_cannot_be_set_later(make: Make, option: dict[str, Any]) -> None:
    model, batch = models.mlp_float64(), models.vector_batch_float64(0, 2)
    with lowtide.initialize(model, CASE.as_config(), optimizer=make(model.parameters())) as engine:
        (group,) = engine.optimizer.param_groups
        before, weights = {name: group[name] for name in option}, engine.state_dict()
        group.update(option)
        assert refusal(engine.train_step, batch) == (
            "optimizer: expected options that keep the rule and the states of the optimizer, found an option, set "
            "after lowtide.initialize, that needs others, such as a momentum above 0, amsgrad or maximize; set it "
            "before"
        )
        assert differences(weights, engine.state_dict()) == []
        group.update(before)
        engine.train_step(batch)


def test_times_at_which_no_group_is_taken() -> None:
    model, optimizer, _ = Row("late").made()
    batch = models.vector_batch_float64(0, 2)
    config = CASE.at(3, accumulation=2).as_config()
    with lowtide.initialize(model, config, optimizer=optimizer) as engine:

        def refused(words: str) -> None:
            group = {"params": list(model.first.parameters())}
            assert words in refusal(engine.optimizer.add_param_group, group, kind=StateError)

        engine.backward(engine(*batch))
        refused("expected a call between steps, found 1 microbatches of a step done")
        engine.zero_grad()
        with engine.no_sync():
            refused("found it inside of engine.no_sync()")
        with engine.gathered():
            refused(
                "expected no gathered parameters, found 'first.weight' gathered; call it outside of `with "
                "engine.gathered():` (zero.GatheredParameters in lowtide.deepspeed)"
            )
        with engine.join():
            refused("outside of `with engine.join")
        words = "expected no call in progress, found engine.train_step(): this call comes from inside of it"
        handle = model.last.register_forward_hook(lambda *args: refused(words))
        engine.train_step(iter([batch, batch]))
        handle.remove()
        engine.optimizer.add_param_group({"params": list(model.first.parameters())})
        engine.train_step(iter([batch, batch]))


def test_a_graph_of_before_a_group_that_was_divided() -> None:
    """Autograd refuses it where its weights may be gone, as after a step; where they stay it is as in torch."""
    model, *_ = Row("late").made()
    model.first.requires_grad_(True)
    with lowtide.initialize(model, CASE.at(3).as_config(), optimizer=adamw(model.first.parameters())) as engine:
        loss = engine(*models.vector_batch_float64(0, 2))
        engine.optimizer.add_param_group({"params": [model.layers[1].weight]})
        assert "modified by an inplace operation" in refusal(engine.backward, loss, kind=RuntimeError)
        engine.train_step(models.vector_batch_float64(0, 2))


def test_offloaded_activations_leave_out_the_parameters_of_a_group_that_was_divided(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1}
    engine, _ = Row("late", at(0, {"activation_checkpointing": {"offload": offload}})).started()
    with engine:
        first = engine.module.get_submodule("first")
        old = StorageWeakRef(first.get_parameter("weight").untyped_storage())
        engine.optimizer.add_param_group({"params": [first.get_parameter("bias").requires_grad_()]})
        gc.collect()
        assert old.expired()
        activations = engine._parts.activations
        assert activations is not None and all(map(activations.is_parameter_storage, engine.parameters()))


@on_ranks(2)
def test_too_little_room_for_a_group_on_one_rank(tmp_path: Path) -> None:
    """Rank 1 has no room for new shards; training goes on as without the call."""
    config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    states = []
    for is_added in (True, False):
        model, *_ = Row("late").made()
        model.first.requires_grad_(True)
        optimizer = adamw(model.first.parameters())
        with lowtide.initialize(model, CASE.at(3, config=config).as_config(), optimizer=optimizer) as engine:
            if is_added:
                group, full = {"params": [model.layers[1].weight]}, lowtide.OffloadError("the disk is full")
                with mock.patch.object(BlockFile, "reserve", side_effect=full) if engine.rank else nullcontext():
                    text = refusal(engine.optimizer.add_param_group, group, kind=RuntimeError)
                where = "" if engine.rank else "engine.optimizer.add_param_group() failed on rank 1: "
                assert text == f"{where}the disk is full"
            engine.train_step(models.vector_batch_float64(0, 2))
            states.append(engine.state_dict())
    assert differences(*states) == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("from the start", "the ranks have different optimizers: parameter 'first.weight' is in group 0 on rank 0"),
        ("parameters", r"found \['first.bias'\] on rank 0, \['first.weight'\] on rank 1"),
        ("options", r"found .*lr=0.0, .* on rank 0, .*lr=1.0, .* on rank 1"),
    ],
)
@on_ranks(2)
def test_ranks_that_have_other_groups(what: str, words: str) -> None:
    model, optimizer, _ = Row("late").made()
    rank = dist.get_rank()
    if what == "from the start":
        optimizer = adamw(some(model) if rank else of_all(model))
        text = refusal(lowtide.initialize, model, CASE.as_config(), optimizer=optimizer, kind=RuntimeError)
    else:
        with lowtide.initialize(model, CASE.as_config(), optimizer=optimizer) as engine:
            params = [model.first.weight if rank and what == "parameters" else model.first.bias]
            group = {"params": params, "lr": float(rank if what == "options" else 0)}
            text = refusal(engine.optimizer.add_param_group, group, kind=RuntimeError)
    assert re.search(words, text)


def test_what_frozen_members_cost_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    found = [
        OptimizerPlan.of(Config.load({}), model, torch.optim.AdamW(members.parameters())).notes(model)
        for members in (model, model[1])
    ]
    assert found[0][0].startswith("optimizer: 2 of its parameters (6 elements) are frozen. Their gradients")
    assert found[1] == []


@pytest.mark.parametrize(
    ("kind", "num_steps", "num_told"), [("AdamW", 1, 2), ("AdamW", 0, 0), ("SGD", 1, 2), ("Adagrad", 0, 0)]
)
def test_states_that_begin_anew_are_told(kind: str, num_steps: int, num_told: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **({"momentum": 0.9} if kind == "SGD" else {}))
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    told = OptimizerPlan.of(Config.load({}), model, optimizer).notes(model)
    words = f"optimizer: its states of {num_told} parameters have no effect, and begin anew; save and load"
    assert [note.startswith(words) for note in told] == ([True] if num_told else [])


def test_parameters_of_another_model_are_refused() -> None:
    model, other = models.mlp(), models.Mlp()
    words = "optimizer: expected parameters of the model (10), found 11 parameters, 1 not in the model"
    optimizer = adamw([*model.parameters(), other.last.bias])
    assert words in refusal(lowtide.initialize, model, CASE.as_config(), optimizer=optimizer)


def test_groups_added_to_the_callers_optimizer_are_told() -> None:
    """It shares its groups with the engine's, which has no memory for them."""
    model, optimizer, _ = Row("some").made()
    with lowtide.initialize(model, CASE.as_config(), optimizer=optimizer) as engine:
        optimizer.add_param_group({"params": list(model.first.parameters())})
        words = (
            r"passed to lowtide.initialize have changed: expected \[.*\] parameters in its groups, found "
            r"\[.*, 2\]; add groups with engine.optimizer.add_param_group"
        )
        assert re.search(words, refusal(engine.train_step, models.vector_batch_float64(0, 2)))
