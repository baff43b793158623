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
from tests.kit.ranks import RankPool
from tests.kit.training import Case, adamw, one_thread, share_of

CASE = Case(models.short_gpt_float64, models.token_batch, accumulation=2)
STAGES = {"auto": (3,), "shared_memory": (0, 3), "sockets": (1, 2)}  # by transport
SHOWN = ("embedding.weight", "blocks.0.qkv.weight", "blocks.0.norm.bias", "position")
STATES = ("exp_avg", "exp_avg_sq")
BF16 = {"bf16": {"enabled": True}}
Seen = dict[str, Tensor]


def run_microbatches(engine: Engine, case: Case, step: int) -> None:
    share = share_of(case.global_batch(step, engine.data_size))
    for part in zip(*(tensor.chunk(case.accumulation) for tensor in share), strict=True):
        engine.backward(engine(*part))


def joined(engine: Engine, part: Tensor, size: int) -> Tensor:
    """The parts of all ranks one behind the other; replicas have all."""
    parts = engine._mesh.world.gather_objects(part)
    return parts[0] if parts[0].numel() == size else torch.cat(parts)


def look(case: Case) -> Seen:
    """Three steps, the second of which clips by hand; after each all values of some parameters."""
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())
    seen: Seen = {}
    params = dict(engine.named_parameters())
    for step in range(3):
        run_microbatches(engine, case, step)
        for name in SHOWN:
            found = engine.gradient(name)
            part = engine.gradient(params[name], local=True)
            assert found is not None and part is not None
            seen[f"{step} {name} gradient"] = found
            assert torch.equal(joined(engine, part, found.numel()), found.reshape(-1))
        if step == 1:
            seen["norm"] = engine.clip_grad_norm_(0.5)
        seen[f"{step} grad_norm"] = engine.step().grad_norm
        for name in SHOWN:
            for state in (None, *STATES):
                whole = seen[f"{step} {name} {state}"] = engine.full(params[name], state)
                assert torch.equal(joined(engine, engine.local(name, state), whole.numel()), whole.reshape(-1))
    engine.close()
    return seen


class WithSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def gradients_of_both(stage: int) -> tuple[bool, bool]:
    config = {"optimizer": {"type": "adamw"}, "zero_optimization": {"stage": stage}}
    with lowtide.initialize(WithSpare(), config) as engine:
        engine(torch.ones(2, 4)).backward()
        return engine.gradient("layer.weight") is not None, engine.gradient("spare.weight") is not None


def test_what_nobody_used_has_no_gradient(ranks: RankPool) -> None:
    for stage in (0, 3):
        assert ranks(2, gradients_of_both, stage) == [(True, False)] * 2


def look_all(cases: list[Case]) -> list[Seen]:
    return [look(case) for case in cases]


@one_thread()
def expected(case: Case, world_size: int) -> Seen:
    torch.manual_seed(0)
    model = case.build()
    optimizer = adamw(model.parameters())
    params = dict(model.named_parameters())
    seen: Seen = {}
    for step in range(3):
        optimizer.zero_grad()
        model(*case.global_batch(step, world_size)).backward()
        seen |= {f"{step} {name} gradient": params[name].grad.clone() for name in SHOWN}  # type: ignore[union-attr]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5 if step == 1 else float("inf"))
        seen |= {"norm": norm} if step == 1 else {}
        seen[f"{step} grad_norm"] = norm
        optimizer.step()
        for name in SHOWN:
            seen[f"{step} {name} None"] = params[name].detach().clone()
            seen |= {f"{step} {name} {state}": optimizer.state[params[name]][state].clone() for state in STATES}
    return seen


@pytest.mark.parametrize(("world_size", "transport"), [(1, "auto"), (2, "shared_memory"), (2, "sockets")])
def test_what_is_shown_is_what_torch_has(ranks: RankPool, world_size: int, transport: str) -> None:
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for stage in STAGES[transport]]
    values = expected(CASE, world_size)
    for rank_seen in ranks(world_size, look_all, cases):
        for case, seen in zip(cases, rank_seen, strict=True):
            assert list(seen) == list(values)
            for name, value in values.items():
                message = f"stage {case.stage}, {name}: {{}}".format
                torch.testing.assert_close(seen[name], value, rtol=1e-9, atol=1e-9, msg=message)


def test_hybrid_sharding_and_hpz_show_the_same(ranks: RankPool) -> None:
    zeros: list[dict[str, Any]] = [{"shard_size": 2}, {"zero_hpz_partition_size": 2}]
    cases = [
        CASE.at(3, config={"zero_optimization": zero, "communication": {"transport": "sockets"}}) for zero in zeros
    ]
    values = expected(CASE, 4)
    for seen in ranks(4, look_whole_values, cases)[0]:
        torch.testing.assert_close(seen, {name: values[name] for name in seen}, rtol=1e-9, atol=1e-9)


def look_whole_values(cases: list[Case]) -> list[Seen]:
    """As `look`, of what is whole alone: how parts lie is another matter where two axes divide."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            run_microbatches(engine, case, 0)
            gradients = {f"0 {name} gradient": engine.gradient(name) for name in SHOWN}
            engine.step()
            seen: Any = {f"0 {name} {state}": engine.full(name, state) for name in SHOWN for state in (None, *STATES)}
            found.append({**gradients, **seen})
    return found


def tied_float64() -> nn.Module:
    return models.TinyGPT(layers=1, tied=True).double()


SO_FAR = CASE.at(0, accumulation=3, build=tied_float64)
SOCKETS = {"communication": {"transport": "sockets"}}
PARTS = {  # by number of ranks
    1: [SO_FAR.at(stage) for stage in (0, 3)],
    2: [
        *(SO_FAR.at(stage, config=SOCKETS) for stage in range(4)),
        *(SO_FAR.at(stage) for stage in (0, 1)),
        SO_FAR.at(1, config={"parallel": {"tensor": 2}}),
        SO_FAR.at(0, config={"optimizer": {"type": "onebitadam", "params": {"lr": 1e-3, "freeze_step": 0}}}),
        SO_FAR.at(2, config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        SO_FAR.at(1, config={"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}),
    ],
    4: [SO_FAR.at(stage, config={"zero_optimization": {"shard_size": 2}}) for stage in (1, 3)],
}


def look_so_far(cases: list[Case], folder: str) -> list[tuple[int, list[Seen], str]]:
    """How many ranks have other data; what is shown after each backward of a step; and what `local` says."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        config = case.as_config()
        if config["zero_optimization"].get("offload_optimizer", {}).get("device") == "nvme":
            config["zero_optimization"]["offload_optimizer"]["nvme_path"] = folder
        with lowtide.initialize(case.build(), config) as engine:
            shown: list[Any] = []
            text = ""
            share = [one.chunk(engine.data_size)[engine.data_rank] for one in case.global_batch(0, engine.data_size)]
            for part in zip(*(tensor.chunk(case.accumulation) for tensor in share), strict=True):
                engine.backward(engine(*part))
                shown.append({name: engine.gradient(name) for name in SHOWN})
                try:
                    own = engine.gradient("position", local=True)
                    assert own is not None and torch.equal(
                        joined(engine, own, models.LENGTH * 22), shown[-1]["position"].reshape(-1)
                    )
                except StateError as error:
                    text = str(error)
            engine.set_gradient("embedding.weight", 2 * shown[-1]["embedding.weight"])
            torch.testing.assert_close(engine.gradient("embedding.weight"), 2 * shown[-1]["embedding.weight"])
            found.append((engine.data_size, shown, text))
    return found


@one_thread()
def gradients_so_far(case: Case, num_shares: int) -> list[Seen]:
    torch.manual_seed(0)
    model = case.build()
    params = dict(model.named_parameters())
    batch, found = case.global_batch(0, num_shares), []
    shares = [
        [one.chunk(case.accumulation) for one in share]
        for share in zip(*(t.chunk(num_shares) for t in batch), strict=True)
    ]
    for number in range(case.accumulation):
        for share in shares:
            (model(*(parts[number] for parts in share)) / (num_shares * case.accumulation)).backward()
        found.append({name: params[name].grad.clone() for name in SHOWN})  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("world_size", PARTS)
def test_the_gradient_so_far_is_that_of_torch(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    for seen in ranks(world_size, look_so_far, PARTS[world_size], str(tmp_path)):
        for case, (num_shares, shown, text) in zip(PARTS[world_size], seen, strict=True):
            torch.testing.assert_close(shown, gradients_so_far(case, num_shares), rtol=1e-9, atol=1e-9, msg=str(case))
            is_summed = num_shares == 1 or (case.stage > 1 and "shard_size" not in str(case.config))
            assert text == ("" if is_summed else LOCAL), case


LOCAL = (
    "engine.gradient() (safe_get_local_grad in lowtide.deepspeed): expected the gradient of 'position' summed over the "
    "ranks, found a term of it: the last backward of a step sums it, or with a 1-bit optimizer the step. Without "
    "`local` (safe_get_full_grad in lowtide.deepspeed) the call sums it, on all ranks"
)


def change(engine: Engine, how: str) -> None:
    """The same values by each way to set them."""
    for number, name in enumerate(SHOWN):
        for state, shift in ((None, 0.25), ("exp_avg", 0.125), ("exp_avg_sq", 0.5)):
            if how == "full":
                value = engine.full(name, state) + shift * (number + 1)
                engine.set_full(name, value if engine.rank == 0 else torch.zeros_like(value), state)
            else:
                engine.set_local(name, engine.local(name, state) + shift * (number + 1), state)


def train_and_change(cases: list[Case], *ways: str) -> list[tuple[list[float], Seen]]:
    """Two steps, a change, a step; then the state of the optimizer, and of the model."""
    found = []
    for case in cases:
        for how in ways:
            torch.manual_seed(0)
            with lowtide.initialize(case.build(), case.as_config()) as engine:
                losses = []
                for step in range(3):
                    losses.append(engine.train_step(share_of(case.global_batch(step, engine.data_size))).loss.item())
                    if step == 1:
                        change(engine, how)
                seen = {f"{name} {state}": engine.full(name, state) for name in SHOWN for state in (None, *STATES)}
                found.append((losses, {**seen, **engine.state_dict()}))
    return found


@one_thread()
def changed_by_torch(case: Case, world_size: int) -> tuple[list[float], Seen]:
    torch.manual_seed(0)
    model = case.build()
    optimizer = adamw(model.parameters())
    losses, params = [], dict(model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*case.global_batch(step, world_size))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        for number, name in enumerate(SHOWN if step == 1 else ()):
            with torch.no_grad():
                params[name].add_(0.25 * (number + 1))
            optimizer.state[params[name]]["exp_avg"] += 0.125 * (number + 1)
            optimizer.state[params[name]]["exp_avg_sq"] += 0.5 * (number + 1)
    seen = {f"{name} None": params[name].detach() for name in SHOWN}
    seen |= {f"{name} {state}": optimizer.state[params[name]][state] for name in SHOWN for state in STATES}
    return losses, {**seen, **model.state_dict()}


@pytest.mark.parametrize(("world_size", "transport"), [(1, "auto"), (2, "shared_memory"), (2, "sockets")])
def test_what_is_set_is_what_training_goes_on_with(ranks: RankPool, world_size: int, transport: str) -> None:
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for stage in STAGES[transport]]
    losses, values = changed_by_torch(CASE, world_size)
    for found_losses, seen in ranks(world_size, train_and_change, cases, "full", "local")[0]:
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close({name: seen[name] for name in values}, values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_rests_elsewhere_is_shown_and_set_alike(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    """Offload of states and parameters to memory and files, delayed and speculative updates: the bits of no offload."""
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    case = Case(models.short_gpt, models.token_batch, stage=3, config=BF16 if precision == "bf16" else {})
    offloads: list[dict[str, Any]] = [
        {},
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": file, "offload_param": file},
        {"offload_optimizer": {**file, "overlap": "speculative"}},
    ]
    cases = [case.at(3, config={"zero_optimization": offload}) for offload in offloads]
    plain, *others = ranks(2, train_and_change, cases, "full")[0]
    for losses, seen in others:
        assert losses == plain[0]
        assert [name for name, value in plain[1].items() if not torch.equal(seen[name], value)] == []


def test_a_delayed_update_is_waited_for() -> None:
    delayed = {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 0}}
    case = Case(models.mlp, models.vector_batch, stage=2, config={"zero_optimization": delayed, **BF16})
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        for step in range(3):
            engine.train_step(case.global_batch(step, 1))
        value = engine.full("last.weight")
        assert torch.equal(engine.state_dict()["last.weight"], value.bfloat16())
        engine.set_full("last.weight", torch.full((3, 7), 0.3))
        engine.train_step(case.global_batch(3, 1))
        assert (engine.full("last.weight") - 0.3).abs().max() < 0.05


def test_8_bit_states_are_float32_here() -> None:
    optimizer = {"type": "adamw", "params": {"lr": 1e-2, "state_dtype": "int8"}}
    case = Case(models.tiny_gpt, models.token_batch, config={"optimizer": optimizer})
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        engine.train_step(case.global_batch(0, 1))
        engine.set_full("norm.bias", torch.full((22,), 0.5), "exp_avg")
        found = engine.full("norm.bias", "exp_avg")
        torch.testing.assert_close(found, torch.full((22,), 0.5), rtol=2e-2, atol=0)
        assert engine.local("head.weight", "exp_avg_sq").dtype == torch.float32


def test_the_callers_own_optimizer_has_states_of_its_own_names() -> None:
    with lowtide.initialize(models.mlp(), {"steps_per_print": 0}, optimizer=torch.optim.NAdam) as engine:
        engine.train_step(models.vector_batch(0, 2))
        engine.set_full("last.bias", torch.ones(3), "exp_avg")
        assert torch.equal(engine.full("last.bias", "exp_avg"), torch.ones(3))
        with pytest.raises(
            ValueError, match=r"expected a state with the shape of 'last.bias' \(exp_avg, exp_avg_sq\), found 'mu_p"
        ):
            engine.full("last.bias", "mu_product")


def test_states_that_the_callers_own_optimizer_has_not_made_are_not_set() -> None:
    """It would begin with others."""
    with lowtide.initialize(models.mlp(), {"steps_per_print": 0}, optimizer=torch.optim.NAdam) as engine:
        engine.module.get_parameter("last.bias").requires_grad_(False)
        engine.train_step(models.vector_batch(0, 2))
        assert not engine.full("last.bias", "exp_avg").any()
        for change, numel in ((engine.set_full, 3), (engine.set_local, engine.local("last.bias").numel())):
            with pytest.raises(ValueError, match=r"expected a parameter that a step has updated, found 'last\.bias'"):
                change("last.bias", torch.ones(numel), "exp_avg")


class Tied(models.TinyGPT):
    """With a frozen parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.position.requires_grad_(False)


def look_at_tied_and_frozen(stages: tuple[int, ...]) -> list[list[Any]]:
    found = []
    for stage in stages:
        torch.manual_seed(0)
        case = Case(Tied, models.token_batch, stage, config=BF16)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            engine.backward(engine(*share_of(case.global_batch(0, engine.data_size))))
            seen: list[Any] = [engine.gradient("position"), engine.gradient("head.weight")]
            engine.step()
            engine.set_full("head.weight", torch.full((models.VOCAB, 22), 0.25))
            engine.set_full("position", torch.full((models.LENGTH, 22), 0.125))
            names = ("embedding.weight", "position")
            state = engine.state_dict()
            found.append([*seen, *(engine.full(name) for name in names), *(state.get(name) for name in names)])
            words = (
                r"engine.full\(\) \(safe_get_full_optimizer_state in .*\): expected a trained .*, found 'position', wh"
            )
            with pytest.raises(ValueError, match=words):
                engine.full("position", "exp_avg")
    return found


def test_tied_and_frozen_parameters(ranks: RankPool) -> None:
    for frozen, tied, *values in ranks(2, look_at_tied_and_frozen, (0, 1, 3))[0]:
        assert frozen is None and tied.shape == (models.VOCAB, 22)
        assert [value.unique().tolist() for value in values] == [[0.25], [0.125]] * 2


class OwnAdamW(torch.optim.AdamW):
    """No rule is known to do the same."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "NAdam": torch.optim.NAdam,
    "the caller's own": OwnAdamW,
}
RESET = ("0.weight", "2.bias")


def reset_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def with_reset(make: Any, stage: int, folder: str, zero: dict[str, Any]) -> Seen:
    """Six steps, which forget states behind the third, and go on from a checkpoint behind the fourth."""
    x = torch.linspace(-1, 1, 28, dtype=torch.float64).view(4, 7)
    config = {"zero_optimization": {"stage": stage, **zero}, "steps_per_print": 0}

    def steps(engine: Engine, num: int) -> None:
        for _ in range(num):
            engine.backward(engine(x).square().mean())
            engine.step()

    engine = lowtide.initialize(reset_net(), config, optimizer=partial(make, lr=0.05))
    engine.reset_states(*RESET)  # before the first step there is nothing to forget
    steps(engine, 3)
    engine.reset_states(RESET[0], engine.module.get_parameter(RESET[1]))
    steps(engine, 1)
    engine.save_checkpoint(folder)
    engine.close()
    with lowtide.initialize(reset_net(), config, optimizer=partial(make, lr=0.05)) as engine:
        engine.load_checkpoint(folder)
        steps(engine, 2)
        return engine.state_dict()


def with_states_deleted(make: Any) -> Seen:
    model = reset_net()
    optimizer = make(model.parameters(), lr=0.05)
    for step in range(6):
        if step == 3:
            for name in RESET:
                del optimizer.state[model.get_parameter(name)]
        model(torch.linspace(-1, 1, 28, dtype=torch.float64).view(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    ("kind", "stage", "rests"),
    [*((kind, stage, False) for kind in OPTIMIZERS for stage in (0, 3)), ("AdamW", 3, True)],
)
def test_states_are_reset_as_torch_deletes_them(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, rests: bool
) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}} if rests else {}
    found = ranks(2, with_reset, OPTIMIZERS[kind], stage, str(tmp_path / "saved"), zero)[0]
    for name, value in with_states_deleted(OPTIMIZERS[kind]).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "name", "text"),
    [
        ({"type": "adamw"}, "3.weight", "as in engine.named_parameters\\(\\), found '3.weight'"),
        ({"type": "adamw"}, "0.bias", "expected trained parameters, found '0.bias', which is frozen; leave it out"),
        ({"type": "OneBitAdam"}, "0.weight", "save the weights, and begin with a new engine"),
    ],
)
def test_states_that_cannot_be_reset_are_refused(optimizer: dict[str, Any], name: str, text: str) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    with lowtide.initialize(model, {"optimizer": optimizer}) as engine:
        with pytest.raises(ValueError, match=text):
            engine.reset_states(name)
        with engine.no_sync():
            engine.backward(engine(torch.ones(2, 7)).sum())
        with pytest.raises(StateError, match=r"engine.reset_states\(\): expected a call between steps"):
            engine.reset_states("0.weight")
