"""`engine.offload_states`: what it frees is free, nothing that needs it runs, and the training goes on bit by bit."""

import gc
import re
from functools import partial
from typing import Any

import pytest
import torch

from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import on_device
from tests.kit.training import Case, refusal, start
from tests.pretend.group import register

HOST = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
ALL, TRAINING = ("optimizer", "gradients", "parameters"), ("optimizer", "gradients")


GPT = Case(partial(models.TinyGPT, width=16, layers=1), models.token_batch)


def at(stage: int, config: dict[str, Any], accumulation: int = 1, **zero: Any) -> Case:
    """Of one microbatch, no stage and no place changes a bit. An update that is late does."""
    return GPT.at(stage, accumulation=accumulation, config={**config, "zero_optimization": zero})


# A training, and the kinds that are taken off the device.
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "stage 3, fp32": (at(3, {}), ALL),
    "stage 2, fp16": (at(2, {"fp16": {"enabled": True, "initial_scale_power": 4}}), TRAINING),
    "averages": (at(1, BF16), ()),
    "no masters": (at(3, {"bf16": {"enabled": True, "masters": "int8"}}), ()),
    "8-bit states": (at(2, {**BF16, "optimizer": {"type": "adamw", "params": {"state_dtype": "int8"}}}), ()),
    "muon": (at(1, {**BF16, "optimizer": {"type": "muon", "params": {"lr": 0.01}}}), ()),
    "torch's own": (at(2, {**BF16, "optimizer": {"type": "rmsprop", "params": {"lr": 0.01}}}), ()),
    "speculative": (at(2, BF16, offload_optimizer={**HOST, "overlap": "speculative"}), ()),
    "delayed": (at(3, BF16, offload_optimizer={**HOST, "overlap": "delayed", "delay_after_steps": 1}), ()),
    "parameters on the host": (at(3, BF16, offload_param=HOST), ()),
    "in the backward": (at(3, BF16, update_in_backward=True), ()),
    "sums of microbatches": (at(1, BF16, accumulation=2), ("gradients",)),
    "power sgd": (at(1, {"communication": {"power_sgd": {"rank": 2, "start_step": 0}}}), ("gradients",)),
}


def allocated() -> int:
    torch.accelerator.synchronize()
    gc.collect(), gc.collect()
    return int(torch.accelerator.memory_allocated())


def trained(
    case: Case, kinds: tuple[str, ...] = (), lends: bool = False, has_averages: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses, weights, and what is wrong with what was offloaded after two steps of three. kinds: none for all."""
    wrong, losses = [], []
    with start(case) as engine:
        if has_averages:
            engine.ema(0.9)
        for step in range(3):
            own = case.share(engine, step)
            losses.append(engine.train_step(own).loss.item())
            if step == 2:
                continue
            if not lends:
                engine.state_dict()  # what is under way ends there too
                continue
            held, before = allocated(), engine.memory()
            freed = engine.offload_states(kinds or None)
            again = engine.offload_states(kinds or None)
            now, after = allocated(), engine.memory()
            if (freed, again) != (held - now, 0) or freed < 0:
                wrong.append(f"{freed} and {again} bytes said, {held - now} freed")
            if before.total_bytes - after.total_bytes != freed:
                wrong.append(f"{freed} bytes said, {before} and then {after}")
            if "gradients" in (kinds or ALL) and after.gradient_bytes:
                wrong.append(f"{after.gradient_bytes} bytes of gradients stay")
            is_away = "parameters" in (kinds or ALL)
            found = r"expected the states of the engine on its device, found .* on the host since engine.offload_states"
            for what, call in (
                ("a forward" if is_away else "backward", lambda own=own: engine.train_step(own)),
                ("reading or writing full weights", engine.state_dict),
            ):
                if not re.match(f"{what}: {found}", said := refusal(call, kind=StateError)):
                    wrong.append(said)
            if not is_away:
                losses.append(engine.eval_step(own).item())
            engine.reload_states()
            if is_away:
                losses.append(engine.eval_step(own).item())
            if engine.memory().optimizer_bytes != before.optimizer_bytes:
                wrong.append(f"{before} before, {engine.memory()} at the end")
        return losses, engine.state_dict(), wrong


def plain(case: Case) -> Case:
    late = {key: one for key, one in case.config["zero_optimization"].items() if "delayed" in str(one)}
    return case.at(case.stage if case.accumulation > 1 else 0, config={"zero_optimization": late})


@on_device(2)
def test_offloaded_states_are_free_and_come_back() -> None:
    register()
    plain_cases: list[Case] = []
    for case, _ in CASES.values():
        if plain(case) not in plain_cases:
            plain_cases.append(plain(case))
    outcomes = [trained(case) for case in plain_cases]
    found = {name: compared(name, *outcomes[plain_cases.index(plain(case))]) for name, (case, _) in CASES.items()}
    assert found == {name: [] for name in CASES}


def compared(name: str, losses: list[float], weights: dict[str, torch.Tensor], _: list[str]) -> list[str]:
    others, values, wrong = trained(*CASES[name], lends=True, has_averages=name == "averages")
    kept = [others[at] for at in (0, 2, 4)]  # an evaluation follows on each lending
    if losses != kept:
        wrong.append(f"losses {losses}, and {kept}")
    return wrong + [name for name, value in weights.items() if not torch.equal(value, values[name])]


@pytest.mark.parametrize(
    ("kinds", "stage", "expected"),
    [
        (["optimiser"], 3, "expected some of optimizer, gradients, parameters in include, found 'optimiser'"),
        (
            ["parameters"],
            2,
            "expected parameters that are freed after use (stage 3 over several ranks that share no memory), found",
        ),
    ],
)
@on_device(2)
def test_what_cannot_be_offloaded(kinds: list[str], stage: int, expected: str) -> None:
    register()
    with start(at(stage, BF16)) as engine:
        text = refusal(engine.offload_states, kinds)
    assert text.startswith(f"engine.offload_states(): {expected}")


def test_on_the_host_there_is_nothing_to_lend() -> None:
    with start(at(1, {**BF16, "device": "cpu"})) as engine:
        engine.train_step(models.token_batch(0, 2))
        assert engine.offload_states() == 0
        engine.reload_states()
        engine.train_step(models.token_batch(1, 2))


@on_device(2)
def test_an_engine_may_be_closed_meanwhile() -> None:
    """The model has its parameters when the engine is closed."""
    register()
    with start(at(3, BF16)) as engine:
        engine.train_step(models.token_batch(0, 2))
        expected = engine.memory().parameter_bytes
        engine.offload_states()
    assert engine.memory().parameter_bytes == expected
