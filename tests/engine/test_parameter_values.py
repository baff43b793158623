"""A parameter's gradient, master weights and states are those of torch, whole and in parts, wherever they rest."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import (
    Case,
    Outcome,
    assert_alike,
    assert_close,
    one_thread,
    refusal,
    start,
    train,
    train_plainly,
)

CASE = Case(models.short_gpt_float64, models.token_batch, accumulation=2)
STAGES = {"auto": (3,), "shared_memory": (0, 3), "sockets": (1, 2)}  # by transport; "auto" is of one rank
SHOWN = ("embedding.weight", "blocks.0.qkv.weight", "blocks.0.norm.bias", "position")
STATES = ("exp_avg", "exp_avg_sq")
BF16 = {"bf16": {"enabled": True}}
SOCKETS = {"communication": {"transport": "sockets"}}
Seen = dict[str, Tensor]


def joined(engine: Engine, part: Tensor, size: int) -> Tensor:
    """The parts of all ranks one behind the other; replicas have all."""
    parts = engine._mesh.world.gather_objects(part)
    return parts[0] if parts[0].numel() == size else torch.cat(parts)


def look(seen: Seen, engine: Engine, case: Case, step: int) -> Any:
    """A step that clips by hand; before it all values of some parameters. Where an axis divides, their parts too."""
    has_parts = "zero_optimization" not in case.config

    def note(name: str, whole: Tensor | None, part: Tensor | None) -> None:
        assert whole is not None and part is not None
        seen[f"{step} {name}"] = whole
        assert not has_parts or torch.equal(joined(engine, part, whole.numel()), whole.reshape(-1))

    params = dict(engine.named_parameters())
    for microbatch in case.microbatches(engine, step):
        engine.backward(engine(*microbatch))
    for name in SHOWN:
        note(f"{name} gradient", engine.gradient(name), engine.gradient(params[name], local=True))
        for state in (None, *STATES) if step else ():
            note(f"{name} {state}", engine.full(params[name], state), engine.local(name, state))
    engine.clip_grad_norm_(0.5)
    return engine.step()


def look_plainly(seen: Seen, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name in SHOWN:
        param = model.get_parameter(name)
        assert param.grad is not None
        seen[f"{step} {name} gradient"] = param.grad.clone()
        if step:
            seen[f"{step} {name} None"] = param.detach().clone()
            seen |= {f"{step} {name} {state}": optimizer.state[param][state].clone() for state in STATES}


def look_all(cases: list[Case]) -> list[tuple[Outcome, Seen]]:
    found = []
    for case in cases:
        seen: Seen = {}
        found.append((train(case, partial(look, seen)), seen))
    return found


HYBRID: list[dict[str, Any]] = [{"shard_size": 2}, {"zero_hpz_partition_size": 2}]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        *(
            (1 if route == "auto" else 2, [CASE.at(s, config={"communication": {"transport": route}}) for s in stages])
            for route, stages in STAGES.items()
        ),
        (4, [CASE.at(3, config={"zero_optimization": zero, **SOCKETS}) for zero in HYBRID]),
    ],
    ids=[*STAGES, "hybrid"],
)
def test_what_is_shown_is_what_torch_has(ranks: RankPool, world_size: int, cases: list[Case]) -> None:
    values: Seen = {}
    expected = train_plainly(CASE.at(0, clip=0.5), world_size, before_update=partial(look_plainly, values))
    by_rank = ranks(world_size, look_all, cases)
    for case, (outcome, _) in zip(cases, by_rank[0], strict=True):
        assert_close(outcome, expected, 1e-9, 1e-9, f"{case}")
    for seen in (seen for found in by_rank for _, seen in found):
        torch.testing.assert_close(seen, values, rtol=1e-9, atol=1e-9)


def tied_float64() -> nn.Module:
    return models.TinyGPT(layers=1, tied=True).double()


SO_FAR = CASE.at(0, accumulation=3, build=tied_float64)
PARTS = {  # by number of ranks
    2: [
        *(SO_FAR.at(stage, config=SOCKETS) for stage in (1, 2, 3)),
        SO_FAR.at(0),
        SO_FAR.at(1, config={"parallel": {"tensor": 2}}),
        SO_FAR.at(0, config={"optimizer": {"type": "onebitadam", "params": {"lr": 1e-3, "freeze_step": 0}}}),
        SO_FAR.at(2, config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    ],
    4: [SO_FAR.at(stage, config={"zero_optimization": {"shard_size": 2}}) for stage in (1, 3)],
}
LOCAL = (
    "engine.gradient() (safe_get_local_grad in lowtide.deepspeed): expected the gradient of 'position' summed over the "
    "ranks, found a term of it: the last backward of a step sums it, or with a 1-bit optimizer the step. Without "
    "`local` (safe_get_full_grad in lowtide.deepspeed) the call sums it, on all ranks"
)


def look_so_far(cases: list[Case]) -> list[tuple[int, list[Seen], str]]:
    """How many ranks have other data; what is shown after each backward of a step; and what `local` says."""
    found = []
    for case in cases:
        with start(case) as engine:
            shown: list[Any] = []
            text = ""
            for part in case.microbatches(engine, 0):
                engine.backward(engine(*part))
                shown.append({name: engine.gradient(name) for name in SHOWN})
                whole = shown[-1]["position"]
                try:
                    own = engine.gradient("position", local=True)
                    assert own is not None and torch.equal(joined(engine, own, whole.numel()), whole.reshape(-1))
                except StateError as error:
                    text = str(error)
            engine.set_gradient("embedding.weight", 2 * shown[-1]["embedding.weight"])
            torch.testing.assert_close(engine.gradient("embedding.weight"), 2 * shown[-1]["embedding.weight"])
            found.append((engine.data_size, shown, text))
    return found


@one_thread()
def gradients_so_far(case: Case, num_shares: int) -> list[Seen]:
    torch.manual_seed(0)
    model, found = case.build(), []
    shares = zip(*(tensor.chunk(num_shares) for tensor in case.global_batch(0, num_shares)), strict=True)
    parts = [[one.chunk(case.accumulation) for one in share] for share in shares]
    for number in range(case.accumulation):
        for part in parts:
            (model(*(one[number] for one in part)) / (num_shares * case.accumulation)).backward()
        found.append({name: model.get_parameter(name).grad.clone() for name in SHOWN})  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("world_size", PARTS)
def test_the_gradient_so_far_is_that_of_torch(ranks: RankPool, world_size: int) -> None:
    for seen in ranks(world_size, look_so_far, PARTS[world_size]):
        for case, (num_shares, shown, text) in zip(PARTS[world_size], seen, strict=True):
            torch.testing.assert_close(shown, gradients_so_far(case, num_shares), rtol=1e-9, atol=1e-9, msg=str(case))
            is_summed = num_shares == 1 or (case.stage > 1 and "shard_size" not in str(case.config))
            assert text == ("" if is_summed else LOCAL), case


SHIFTS = {None: 0.25, "exp_avg": 0.125, "exp_avg_sq": 0.5}


def change(way: str, engine: Engine, case: Case, step: int) -> Any:
    """The same values by each way to set them, before the last step."""
    for number, name in enumerate(SHOWN if step == 2 else ()):
        for state, shift in SHIFTS.items():
            if way == "full":
                value = engine.full(name, state) + shift * (number + 1)
                engine.set_full(name, value if engine.rank == 0 else torch.zeros_like(value), state)
            else:
                engine.set_local(name, engine.local(name, state) + shift * (number + 1), state)
    return engine.train_step(case.share(engine, step))


def change_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, name in enumerate(SHOWN if step == 2 else ()):
        param = model.get_parameter(name)
        with torch.no_grad():
            param.add_(SHIFTS[None] * (number + 1))
        for state in STATES:
            optimizer.state[param][state] += SHIFTS[state] * (number + 1)


def train_and_change(cases: list[Case], ways: tuple[str, ...]) -> list[Outcome]:
    return [train(case, partial(change, way)) for case in cases for way in ways]


@pytest.mark.parametrize(("world_size", "transport"), [(1, "auto"), (2, "shared_memory"), (2, "sockets")])
def test_what_is_set_is_what_training_goes_on_with(ranks: RankPool, world_size: int, transport: str) -> None:
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for stage in STAGES[transport]]
    expected = train_plainly(CASE, world_size, before_step=change_plainly)
    for outcome in ranks(world_size, train_and_change, cases, ("full", "local"))[0]:
        assert_close(outcome, expected, 1e-9, 1e-9)


@pytest.mark.parametrize("precision", [BF16, {}], ids=["bf16", "fp32"])
@on_ranks(2)
def test_what_rests_elsewhere_is_shown_and_set_alike(tmp_path: Path, precision: dict[str, Any]) -> None:
    """Offload of states and parameters to memory and files, and speculative updates: the bits of no offload."""
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    case = Case(models.short_gpt, models.token_batch, stage=3, config=precision)
    offloads: list[dict[str, Any]] = [
        {},
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": file, "offload_param": file},
        {"offload_optimizer": {**file, "overlap": "speculative"}},
    ]
    cases = [case.at(3, config={"zero_optimization": offload}) for offload in offloads]
    assert_alike(train_and_change(cases, ("full",)))


def test_8_bit_states_are_float32_here() -> None:
    optimizer = {"type": "adamw", "params": {"lr": 1e-2, "state_dtype": "int8"}}
    case = Case(models.short_gpt, models.token_batch, config={"optimizer": optimizer})
    with start(case) as engine:
        engine.train_step(case.global_batch(0, 1))
        engine.set_full("norm.bias", torch.full((22,), 0.5), "exp_avg")
        found = engine.full("norm.bias", "exp_avg")
        torch.testing.assert_close(found, torch.full((22,), 0.5), rtol=2e-2, atol=0)
        assert engine.local("head.weight", "exp_avg_sq").dtype == torch.float32


def test_the_callers_own_optimizer_has_states_of_its_own_names() -> None:
    """Those that it has not made yet are not set: it would begin with others."""
    with lowtide.initialize(models.mlp(), {"steps_per_print": 0}, optimizer=torch.optim.NAdam) as engine:
        engine.module.get_parameter("first.bias").requires_grad_(False)
        engine.train_step(models.vector_batch(0, 2))
        engine.set_full("last.bias", torch.ones(3), "exp_avg")
        assert torch.equal(engine.full("last.bias", "exp_avg"), torch.ones(3))
        assert (
            "expected a state with the shape of 'last.bias' (exp_avg, exp_avg_sq), found 'mu_p"
            in refusal(engine.full, "last.bias", "mu_product")
        )  # fmt: skip
        assert not engine.full("first.bias", "exp_avg").any()
        for set_it, numel in ((engine.set_full, 7), (engine.set_local, engine.local("first.bias").numel())):
            text = refusal(set_it, "first.bias", torch.ones(numel), "exp_avg")
            assert "expected a parameter that a step has updated, found 'first.bias'" in text


class Tied(models.TinyGPT):
    """With a frozen parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__(layers=1, tied=True)
        self.position.requires_grad_(False)


@on_ranks(2)
def test_tied_and_frozen_parameters() -> None:
    for stage in (0, 1, 3):
        case = Case(Tied, models.token_batch, stage, config=BF16)
        with start(case) as engine:
            engine.backward(engine(*case.share(engine, 0)))
            tied = engine.gradient("head.weight")
            assert engine.gradient("position") is None and tied is not None and tied.shape == (models.VOCAB, 22)
            engine.step()
            engine.set_full("head.weight", torch.full((models.VOCAB, 22), 0.25))
            engine.set_full("position", torch.full((models.LENGTH, 22), 0.125))
            state = engine.state_dict()
            for name, value in (("embedding.weight", 0.25), ("position", 0.125)):
                assert [one.unique().tolist() for one in (engine.full(name), state.get(name, engine.full(name)))] == [
                    [value]
                ] * 2
            text = refusal(engine.full, "position", "exp_avg")
            assert text.startswith("engine.full() (safe_get_full_optimizer_state in ")
            assert "expected a trained " in text and ", found 'position', wh" in text


class OwnAdamW(torch.optim.AdamW):
    """No rule is known to do the same."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "NAdam": partial(torch.optim.NAdam, lr=0.05),
    "the caller's own": partial(OwnAdamW, lr=0.05),
}
RESET = ("layers.0.weight", "last.bias")
RESETTING = Case(models.mlp_float64, models.vector_batch_float64, steps=6, config={"optimizer": None})


def reset_and_go_on(case: Case, kind: str, folder: str) -> tuple[list[float], Seen]:
    """Six steps, which forget states behind the third, and go on from a checkpoint behind the fourth."""
    losses = []
    with start(case, optimizer=OPTIMIZERS[kind]) as engine:
        engine.reset_states(*RESET)  # before the first step there is nothing to forget
        for step in range(4):
            if step == 3:
                engine.reset_states(RESET[0], engine.module.get_parameter(RESET[1]))
            losses.append(engine.train_step(case.share(engine, step)).loss.item())
        engine.save_checkpoint(folder)
    with start(case, optimizer=OPTIMIZERS[kind]) as engine:
        engine.load_checkpoint(folder)
        losses += [engine.train_step(case.share(engine, step)).loss.item() for step in (4, 5)]
        return losses, engine.state_dict()


def delete_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name in RESET if step == 3 else ():
        del optimizer.state[model.get_parameter(name)]


@pytest.mark.parametrize(
    ("kind", "stage", "rests"),
    [*((kind, stage, False) for kind, stage in zip(OPTIMIZERS, (0, 3, 0, 3), strict=True)), ("AdamW", 3, True)],
)
def test_states_are_reset_as_torch_deletes_them(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, rests: bool
) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}} if rests else {}
    case = RESETTING.at(stage, config={"zero_optimization": zero})
    losses, state = ranks(2, reset_and_go_on, case, kind, str(tmp_path / "saved"))[0]
    expected = train_plainly(case, 2, OPTIMIZERS[kind], before_step=delete_states)
    torch.testing.assert_close((losses, state), (expected.losses, expected.state), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("optimizer", "name", "text"),
    [
        ({"type": "adamw"}, "3.weight", "as in engine.named_parameters(), found '3.weight'"),
        ({"type": "adamw"}, "0.bias", "expected trained parameters, found '0.bias', which is frozen; leave it out"),
        ({"type": "OneBitAdam"}, "0.weight", "save the weights, and begin with a new engine"),
    ],
)
def test_states_that_cannot_be_reset_are_refused(optimizer: dict[str, Any], name: str, text: str) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    with lowtide.initialize(model, {"optimizer": optimizer}) as engine:
        assert text in refusal(engine.reset_states, name)
        with engine.no_sync():
            engine.backward(engine(torch.ones(2, 7)).sum())
        words = "engine.reset_states(): expected a call between steps"
        assert words in refusal(engine.reset_states, "0.weight", kind=StateError)
