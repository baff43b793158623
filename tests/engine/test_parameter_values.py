"""A parameter's gradient, master weights and states are those of torch, whole and in parts, wherever they rest.

What is set of them, in any way, is what training goes on with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine
from lowtide.kernels.optimizer_states import StoredState
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
    take_step,
    train,
    train_plainly,
)

CLIP = 0.5
CASE = Case(models.short_gpt_float64, models.token_batch, accumulation=2, steps=2)
SHOWN = ("embedding.weight", "blocks.0.qkv.weight", "blocks.0.norm.bias", "position")
STATES = ("exp_avg", "exp_avg_sq")
BF16 = {"bf16": {"enabled": True}}
SOCKETS = {"communication": {"transport": "sockets"}}
Seen = dict[str, Tensor]


def joined(engine: Engine, part: Tensor, size: int) -> Tensor:
    """The parts of all ranks one behind the other; replicas have all."""
    parts = engine._mesh.world.gather_objects(part)
    return parts[0] if parts[0].numel() == size else torch.cat(parts)


def backwards(engine: Engine, case: Case, step: int) -> None:
    for microbatch in case.microbatches(engine, step):
        engine.backward(engine(*microbatch))


# -- ways to use values: by an engine, and by torch -------------------------------------------------------------------


def look(seen: Seen, engine: Engine, case: Case, step: int) -> Any:
    """A step that clips by hand; before it all values of some parameters. Where an axis divides, their parts too."""
    has_parts = "zero_optimization" not in case.config

    def note(name: str, whole: Tensor | None, part: Tensor | None) -> None:
        assert whole is not None and part is not None
        seen[f"{step} {name}"] = whole
        assert not has_parts or torch.equal(joined(engine, part, whole.numel()), whole.reshape(-1))

    params = dict(engine.named_parameters())
    backwards(engine, case, step)
    for name in SHOWN:
        note(f"{name} gradient", engine.gradient(name), engine.gradient(params[name], local=True))
        for state in (None, *STATES) if step else ():
            note(f"{name} {state}", engine.full(params[name], state), engine.local(name, state))
    engine.clip_grad_norm_(CLIP)
    return engine.step()


def look_plainly(seen: Seen, model: Any, optimizer: Any, step: int) -> None:
    for name in SHOWN:
        param = model.get_parameter(name)
        seen[f"{step} {name} gradient"] = param.grad.clone()
        if step:
            seen[f"{step} {name} None"] = param.detach().clone()
            seen |= {f"{step} {name} {state}": optimizer.state[param][state].clone() for state in STATES}


SHIFTS = {None: 0.25, "exp_avg": 0.125, "exp_avg_sq": 0.5}


def shift(way: str, seen: Seen, engine: Engine, case: Case, step: int) -> Any:
    """The same values by each way to set them, before the last step."""
    for number, name in enumerate(SHOWN if step == 1 else ()):
        for state, shift in SHIFTS.items():
            if way == "full":
                value = engine.full(name, state) + shift * (number + 1)
                engine.set_full(name, value if engine.rank == 0 else torch.zeros_like(value), state)
            else:
                engine.set_local(name, engine.local(name, state) + shift * (number + 1), state)
    return take_step(engine, case, step)


def shift_plainly(seen: Seen, model: Any, optimizer: Any, step: int) -> None:
    for number, name in enumerate(SHOWN if step == 1 else ()):
        param = model.get_parameter(name)
        with torch.no_grad():
            param.add_(SHIFTS[None] * (number + 1))
        for state in STATES:
            optimizer.state[param][state] += SHIFTS[state] * (number + 1)


SKIPPED = "blocks.0.norm.bias"  # at step 1
NOISED = ("embedding.weight", "blocks.0.up.weight")
SIGNED = "blocks.0.down.weight"  # by each rank's own part


def noise(gradient: Tensor) -> Tensor:
    return torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3)).to(gradient.dtype)


def set_gradients(seen: Seen, engine: Engine, case: Case, step: int) -> Any:
    backwards(engine, case, step)
    for name in NOISED:
        gradient = engine.gradient(name)
        assert gradient is not None
        engine.set_gradient(name, gradient + noise(gradient))
    part = engine.gradient(SIGNED, local=True)
    assert part is not None
    engine.set_gradient(SIGNED, part.sign(), local=True)
    if step == 1:
        engine.set_gradient(engine.module.get_parameter(SKIPPED), None)
        assert engine.gradient(SKIPPED) is None
    return engine.step()


def set_gradients_plainly(seen: Seen, model: Any, optimizer: Any, step: int) -> None:
    for name in NOISED:
        gradient = model.get_parameter(name).grad
        gradient += noise(gradient)
    signed = model.get_parameter(SIGNED)
    signed.grad = signed.grad.sign()
    if step == 1:
        model.get_parameter(SKIPPED).grad = None


def operate(model: Any) -> None:
    """A surgery on three parameters, in each of the ways in which users write it."""
    with torch.no_grad():
        model.head.weight[3:290] = 0.25
        model.blocks[0].up.weight.mul_(2)
        nn.init.constant_(model.blocks[0].norm.bias, 0.5)


OPERATED = ("head.weight", "blocks.0.up.weight", "blocks.0.norm.bias")


def note(seen: Seen, when: str, model: nn.Module) -> None:
    seen |= {f"{when} {name}": model.get_parameter(name).detach().clone() for name in OPERATED}


def operate_on_gathered(everything: bool, seen: Seen, engine: Engine, case: Case, step: int) -> Any:
    """What `gathered` shows before and after the change. everything: all is gathered for it."""
    params = [engine.module.get_parameter(name) for name in OPERATED]
    if step == 1:
        with engine.gathered(*params):
            note(seen, "before", engine.module)
        with engine.gathered(*([] if everything else params), modify=True):
            operate(engine.module)
        with engine.gathered():
            note(seen, "after", engine.module)
    return take_step(engine, case, step)


def operate_plainly(seen: Seen, model: Any, optimizer: Any, step: int) -> None:
    if step == 1:
        note(seen, "before", model)
        operate(model)
        note(seen, "after", model)


def nothing(*given: object) -> None: ...


@dataclass(frozen=True)
class Way:
    """A step of an engine, and what torch does before its step and before its update. Both note what they see."""

    take: Callable[[Seen, Engine, Case, int], Any]
    before_step: Callable[[Seen, Any, Any, int], object] = nothing
    before_update: Callable[[Seen, Any, Any, int], object] = nothing
    clip: float = CLIP  # of the config


WAYS = {
    "shown": Way(look, before_update=look_plainly, clip=0.0),
    "set": Way(partial(shift, "full"), shift_plainly),
    "set in parts": Way(partial(shift, "local"), shift_plainly),
    "gradients": Way(set_gradients, before_update=set_gradients_plainly),
    "gathered": Way(partial(operate_on_gathered, False), operate_plainly),
    "all gathered": Way(partial(operate_on_gathered, True), operate_plainly),
}
HYBRID: list[dict[str, Any]] = [{"shard_size": 2}, {"zero_hpz_partition_size": 2}]
Rows = Sequence[tuple[str, Case]]
STAGES = {
    **dict.fromkeys(("set", "gathered"), (0, 3)),
    **dict.fromkeys(("set in parts", "all gathered"), (1, 2)),
    **dict.fromkeys(("shown", "gradients"), (0, 1, 2, 3)),
}
ROWS: dict[int, Rows] = {  # by number of ranks
    1: [(way, CASE.at(3)) for way in WAYS],
    2: [
        (way, CASE.at(stage, config={"communication": {"transport": ("shared_memory", "sockets")[stage in (1, 2)]}}))
        for way, stages in STAGES.items()
        for stage in stages
    ],
    4: [
        *(("shown", CASE.at(3, config={"zero_optimization": zero, **SOCKETS})) for zero in HYBRID),
        ("all gathered", CASE.at(3)),  # a parameter fills the third's shard, and reaches into those beside it
    ],
}


def use_all(rows: Rows) -> list[tuple[Outcome, Seen]]:
    found = []
    for way, case in rows:
        seen: Seen = {}
        found.append((train(case.at(case.stage, clip=WAYS[way].clip), partial(WAYS[way].take, seen)), seen))
    return found


def use_plainly(way: Way, world_size: int) -> tuple[Outcome, Seen]:
    seen: Seen = {}
    before_step, before_update = partial(way.before_step, seen), partial(way.before_update, seen)
    return train_plainly(CASE.at(0, clip=CLIP), world_size, before_step=before_step, before_update=before_update), seen


@pytest.mark.parametrize("world_size", ROWS)
def test_what_is_shown_and_set_is_what_torch_has(ranks: RankPool, world_size: int) -> None:
    rows = ROWS[world_size]
    by_way = {name: use_plainly(WAYS[name], world_size) for name in dict(rows)}
    for rank, found in enumerate(ranks(world_size, use_all, rows)):
        for (name, case), (outcome, seen) in zip(rows, found, strict=True):
            expected, values = by_way[name]
            if rank == 0:
                assert_close(outcome, expected, 1e-9, 1e-9, f"{name}, {case}")
            torch.testing.assert_close(seen, values, rtol=1e-9, atol=1e-9, msg=f"{name}, {case}: {{}}".format)


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


@pytest.mark.parametrize("precision", [BF16, {}], ids=["bf16", "fp32"])
def test_what_rests_elsewhere_is_shown_and_set_alike(tmp_path: Path, precision: dict[str, Any]) -> None:
    """Offload of states and parameters to memory and files, and speculative updates: the bits of no offload."""
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    case = Case(models.short_gpt, models.token_batch, stage=3, config=precision)
    offloads: list[dict[str, Any]] = [
        {},
        {"offload_optimizer": {**file, "overlap": "speculative"}},
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": file, "offload_param": file},
    ]
    cases = [case.at(3, config={"zero_optimization": offload}) for offload in offloads]
    for way, own in (("set", cases), ("gradients", cases[:2])):
        assert_alike([outcome for outcome, _ in use_all([(way, case) for case in own])], way)


def test_8_bit_states_are_float32_here(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = {"type": "adamw", "params": {"lr": 1e-2, "state_dtype": "int8"}}
    case = Case(models.short_gpt, models.token_batch, config={"optimizer": optimizer})
    with start(case) as engine:
        engine.train_step(case.global_batch(0, 1))
        with pytest.raises(MemoryError), monkeypatch.context() as patch:
            patch.setattr(StoredState, "widened", Mock(side_effect=MemoryError))
            engine.full("norm.bias", "exp_avg")
        engine.set_full("norm.bias", torch.full((22,), 0.5), "exp_avg")  # after an error too
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
            assert "expected a trained " in text and ", found the frozen 'position'" in text


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
    [("AdamW", 3, True), ("SGD", 3, False), ("NAdam", 0, False), ("the caller's own", 3, False)],
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
        ({"type": "adamw"}, "0.bias", "expected trained parameters, found the frozen '0.bias'; leave it out"),
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


class ReadBeside(nn.Module):
    """Reads a weight of its block outside of the block's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks[1](self.blocks[0](x)) @ self.blocks[0].weight).sum()


@on_ranks(2)
def test_values_that_are_set_replace_those_that_stay_gathered() -> None:
    value, x = torch.randn(4, 4), torch.randn(2, 4)
    with start(Case(ReadBeside, models.token_batch, 3, config=SOCKETS)) as engine, torch.no_grad():
        with torch.enable_grad():
            loss = engine(x)
        engine.set_full("blocks.0.weight", value)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
        engine(x)
        engine.set_full("blocks.0.weight", value)
        blocks = [{name: engine.full(f"blocks.{number}.{name}") for name in ("weight", "bias")} for number in (0, 1)]
        first = nn.functional.linear(x, **blocks[0])
        assert torch.equal(engine(x), (nn.functional.linear(first, **blocks[1]) @ value).sum())
