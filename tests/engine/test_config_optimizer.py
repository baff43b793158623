"""The optimizer section: names, closed parameters, torch's defaults."""

import inspect
from typing import Any

import pytest
import torch

from lowtide.engine.config.config import Config, ConfigError


def load(kind: str, **params: Any) -> Config:
    return Config.load({"optimizer": {"type": kind, "params": params}})


def message_of(optimizer: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load({"optimizer": optimizer})
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "params", "twin"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("SGD", {}, torch.optim.SGD),
        ("Adagrad", {}, torch.optim.Adagrad),
    ],
)
def test_defaults_are_those_of_torch(kind: str, params: dict[str, Any], twin: type[torch.optim.Optimizer]) -> None:
    optimizer = load(kind, **params).optimizer
    assert optimizer is not None and optimizer.type == kind.lower()
    signature = inspect.signature(twin).parameters
    dump = optimizer.params.model_dump(exclude={"state_dtype", "bias_correction"})
    assert dump == {key: signature[key].default for key in dump}
    twin([torch.nn.Parameter(torch.zeros(1))], **dump)


def test_lion_has_the_defaults_of_its_paper() -> None:
    optimizer = load("Lion").optimizer
    assert optimizer is not None
    assert optimizer.params.model_dump() == {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "state_dtype": "fp32",
    }


@pytest.mark.parametrize("kind", ["Adam", "adam", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam"])
def test_adam_is_adamw_unless_adam_w_mode_is_false(kind: str) -> None:
    config = load(kind, lr=0.1)
    assert config.optimizer is not None and config.optimizer.type == "adamw"
    assert config.optimizer.params.model_dump()["weight_decay"] == 0.0
    assert config.notes == (
        f'optimizer.type: type "{kind}" without adam_w_mode false means AdamW (decoupled weight decay), '
        "as in DeepSpeed; weight_decay is 0.0",
    )
    plain = load(kind, lr=0.1, adam_w_mode=False)
    assert plain.optimizer is not None and plain.optimizer.type == "adam" and plain.notes == ()


def test_adamw_is_adamw_whatever_adam_w_mode_says() -> None:
    config = load("AdamW", adam_w_mode=False)
    assert config.optimizer is not None and config.optimizer.type == "adamw"
    assert config.notes == ('optimizer.params.adam_w_mode: false has no effect: type "AdamW" is always AdamW',)
    assert load("FusedLion").optimizer == load("lion").optimizer


def test_arguments_for_the_kernel_have_no_effect_and_a_note() -> None:
    config = load("AdamW", torch_adam=True, fused=True, weight_decay=0.1, amsgrad=False, bias_correction=True)
    reason = "has no effect here: the update is one fused pass over each flat shard"
    assert config.notes[:2] == (f"optimizer.params.torch_adam: true {reason}", f"optimizer.params.fused: true {reason}")


def test_auto_is_the_default_of_the_optimizer() -> None:
    config = load("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")
    assert config.optimizer == load("AdamW").optimizer
    assert config.notes[0] == 'optimizer.params.lr: "auto" is 0.001: the default of this optimizer'
    assert config.notes[1] == 'optimizer.params.betas: "auto" is [0.9, 0.999]: the default of this optimizer'


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("MuAdam", "its learning rates depend on base shapes of the model"),
        ("LBFGS", "it calls the model several times in a step"),
        ("SparseAdam", "gradients are dense here"),
        ("ASGD", "it averages the weights; engine.ema() does that with any optimizer"),
        ("Rprop", "it needs the whole data set as a batch"),
    ],
)
def test_an_optimizer_that_is_not_done_lists_what_there_is(kind: str, why: str) -> None:
    text = message_of({"type": kind, "params": {"freeze_step": 3, "bias_correction": False}})
    assert text.startswith(f'1 fault:\n  optimizer.type: "{kind}" is not supported yet: {why}')
    assert (
        "; there is adamw, adam, sgd, lion, adagrad, rmsprop, adamax, nadam, radam, adadelta, lamb, muon, adafactor, "
        "onebitadam; or pass your own elementwise torch optimizer class to initialize"
    ) in text


@pytest.mark.parametrize(
    ("kind", "params", "in_its_place"),
    [
        (
            "ZeroOneAdam",
            {"lr": 0.01, "var_freeze_step": 3, "local_step_clipper": 4},
            "rename var_freeze_step to freeze",
        ),
        ("zerooneadam", {}, "and remove var_update_scaler, local_step_scaler and local_step_clipper"),
        ("OneBitLamb", {"freeze_step": 3, "factor_min": "x", "cuda_aware": False}, "with the same freeze_step, and "),
        ("onebitlamb", {"lr": "auto"}, "and remove max_coeff, min_coeff, coeff_beta, factor_max, factor_min and "),
    ],
)
def test_an_optimizer_that_was_removed_names_the_one_to_use(
    kind: str, params: dict[str, Any], in_its_place: str
) -> None:
    text = message_of({"type": kind, "params": params})
    assert text.startswith(f'1 fault:\n  optimizer.type: "{kind}" was removed; use "onebitadam"')
    assert in_its_place in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "AdamV"}, 'unknown optimizer "AdamV"; did you mean "adam"?; there is adamw'),
        (
            {"type": 3},
            "optimizer.type: expected one of adamw, adam, sgd, lion, adagrad, rmsprop, adamax, nadam, ",
        ),
        ({"params": {}}, "optimizer.type: expected one of adamw, adam, sgd, lion, adagrad"),
        ({"tyzpe": "AdamW"}, 'optimizer.tyzpe: unknown key "tyzpe"; did you mean "type"?'),
        ({"type": "AdamV", "parms": {}}, 'optimizer.parms: unknown key "parms"; did you mean "params"?'),
        ("AdamW", 'optimizer: expected an object, found "AdamW"'),
        ({"type": "SGD", "params": 3}, "optimizer.params: expected an object, found 3"),
        ({"type": "SGD", "parms": {}}, 'optimizer.parms: unknown key "parms"; did you mean "params"?'),
        (
            {"type": "SGD", "params": {"betas": [0.9, 0.9]}},
            'optimizer.params.betas: unknown key "betas"; the keys here',
        ),
        ({"type": "AdamW", "params": {"weigth_decay": 1}}, 'did you mean "weight_decay"?'),
        ({"type": "AdamW", "params": {"lr": "low"}}, 'optimizer.params.lr: expected a number, found "low"'),
        ({"type": "AdamW", "params": {"lr": -1}}, "optimizer.params.lr: expected at least 0, found -1"),
        (
            {"type": "AdamW", "params": {"betas": [0.9, 1.0]}},
            "optimizer.params.betas[1]: expected less than 1, found 1.0",
        ),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, "optimizer.params.betas[1]: must be given"),
        ({"type": "AdamW", "params": {"betas": 0.9}}, "optimizer.params.betas: expected a list, found 0.9"),
        ({"type": "AdamW", "params": {"betas": [0, 0, 0]}}, "betas: expected at most 2 values, found [0, 0, 0]"),
        ({"type": "Adam", "params": {"adam_w_mode": 1}}, "adam_w_mode: expected true or false, found 1"),
        (
            {"type": "AdamW", "params": {"amsgrad": True}},
            "optimizer.params.amsgrad: true is not supported yet; set false; or pass your own torch optimizer class",
        ),
        ({"type": "AdamW", "params": {"bias_correction": 0}}, "bias_correction: expected true or false, found 0"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "set gradient_clipping at the top level instead"),
        (
            {"type": "SGD", "params": {"nesterov": True}},
            "optimizer.params.nesterov: needs momentum above 0 and dampening 0, found momentum 0.0 and dampening 0.0",
        ),
    ],
)
def test_each_fault_says_what_was_expected_and_found(optimizer: Any, expected: str) -> None:
    assert expected in message_of(optimizer)


def test_a_config_made_of_words_is_checked_too() -> None:
    words: list[Any] = [{"type": "sgd"}, {"type": "AdamW", "params": {}}, {"params": {}}, {"type": 3}]
    made = Config(train_batch_size=8, optimizer=words[0])
    assert made.optimizer is not None and made.optimizer.options["lr"] == 1e-3
    for section in words[1:]:
        with pytest.raises(ValueError, match=r"optimizer\.type"):
            Config(train_batch_size=8, optimizer=section)
