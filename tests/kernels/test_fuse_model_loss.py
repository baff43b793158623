"""When a fused language model leaves out its logits, and what its loss is then."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.kernels.fuse import fuse_model
from lowtide.kernels.fused_loss import loss_only
from tests.kernels.fused_models import CAUSAL_LMS, llama, token_batch
from tests.kit.grids import pairs
from tests.kit.hugging_face import NUM_TOKENS

STEPS = 2.0**-23 * 64  # roundings of float32 in a mean over few rows


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool(((found.double() - wanted.double()).abs() <= STEPS * wanted.double().abs()).all())


def fused_llama(modules: Any = "auto") -> Any:
    model = llama()
    fuse_model(model, modules=modules, backend="reference")
    return model


def test_logits_are_there_unless_only_the_loss_is_read(generator: torch.Generator) -> None:
    model, batch = fused_llama(), token_batch(generator)
    assert model(**batch).logits.shape == (2, 7, NUM_TOKENS)
    with loss_only():
        assert model(**batch).logits is None
        assert model(input_ids=batch["input_ids"]).logits is not None
        assert model(**batch, logits_to_keep=7).logits is not None
        model.eval()
        assert model(**batch).logits is not None
    model.train()
    assert model(**batch).logits is not None


def test_a_named_fusion_leaves_logits_out_in_every_training_forward(generator: torch.Generator) -> None:
    model, batch = fused_llama(["linear_cross_entropy"]), token_batch(generator)
    assert model(**batch).logits is None
    assert model(input_ids=batch["input_ids"]).logits is not None
    model.eval()
    assert model(**batch).logits is not None


@pytest.mark.parametrize(
    ("name", "leaves_logits_out", "options"),
    pairs(
        ("llama", "gemma2", "gpt2"), (False, True), ("ignore_index", "num_items", "num_items_tensor", "shift_labels")
    ),
)
def test_options_of_the_loss(name: str, leaves_logits_out: bool, options: str, generator: torch.Generator) -> None:
    model, batch = CAUSAL_LMS[name](), token_batch(generator)
    choices: dict[str, dict[str, Any]] = {
        "ignore_index": {"ignore_index": int(batch["labels"][0, -1])},
        "num_items": {"num_items_in_batch": 13},
        "num_items_tensor": {"num_items_in_batch": torch.tensor(13)},
        "shift_labels": {"shift_labels": batch["labels"].roll(2, 1)},
    }
    given = choices[options]
    if options == "ignore_index":
        batch["labels"] = batch["labels"].where(batch["labels"] != -100, given["ignore_index"])
        batch["labels"][:, 1] = (given["ignore_index"] + 1) % NUM_TOKENS
    expected = model(**batch, **given).loss
    chosen = ["linear_cross_entropy" if leaves_logits_out else "cross_entropy"]
    fuse_model(model, modules=chosen, backend="reference")
    found = model(**batch, **given)
    assert (found.logits is None) == leaves_logits_out
    assert near(found.loss, expected)


def test_arguments_may_be_positional_and_outputs_tuples(generator: torch.Generator) -> None:
    model, batch = fused_llama(), token_batch(generator)
    expected = model(**batch).loss
    with loss_only():
        found = model(batch["input_ids"], None, None, None, None, batch["labels"])
        assert found.logits is None and near(found.loss, expected)
        found = model(**batch, return_dict=False, output_hidden_states=True, use_cache=False)
        assert isinstance(found, tuple) and near(found[0], expected) and len(found[1]) == 3
        model.config.return_dict = False
        assert isinstance(model(**batch, use_cache=False), tuple)
        assert model(**batch, return_dict=True).loss is not None


def test_a_loss_of_the_users_own_is_kept(generator: torch.Generator) -> None:
    model, batch = fused_llama(), token_batch(generator)
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 7
    with loss_only():
        output = model(**batch)
    assert output.loss.item() == 7 and output.logits is not None


def test_a_head_of_the_users_own_is_kept(generator: torch.Generator) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 3 * super().forward(input)

    model: Any = llama()
    model.lm_head = Scaled(32, NUM_TOKENS, bias=False)
    batch = token_batch(generator)
    expected = model(**batch).loss
    assert "linear_cross_entropy" not in {one.kernel for one in fuse_model(model, backend="reference")}
    with loss_only():
        assert near(model(**batch).loss, expected)


def test_a_head_that_is_replaced_later_is_kept(generator: torch.Generator) -> None:
    """As by PEFT, or by `resize_token_embeddings`."""
    model, batch = fused_llama(), token_batch(generator)
    model.resize_token_embeddings(NUM_TOKENS + 3)
    expected = model(**batch).loss
    with loss_only():
        assert torch.equal(model(**batch).loss, expected)


def test_hooks_on_the_head_see_it_called(generator: torch.Generator) -> None:
    """ZeRO gathers the head's weight in such hooks."""
    model = fused_llama()
    calls: list[object] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.lm_head.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))
    with loss_only():
        model(**token_batch(generator)).loss.backward()
    assert calls == ["before", ()]


@pytest.mark.parametrize(
    ("target", "weight"),
    [
        (torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]), None),
        (torch.tensor([0, 2]), torch.tensor([1.0, 2.0, 0.5])),
        (torch.tensor(1), None),
        (torch.tensor([[1, 2], [0, 1]]), None),
    ],
    ids=["probabilities", "weights", "one row", "pixels"],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_module_takes_all_that_torch_takes(
    target: Tensor, weight: Tensor | None, reduction: str, generator: torch.Generator
) -> None:
    shape = (3,) if target.dim() == 0 else (2, 3, 2) if target.shape == (2, 2) else (2, 3)
    logits = torch.randn(shape, generator=generator)
    plain = nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=0.2)
    expected = plain(logits, target)
    assert len(fuse_model(plain, backend="reference")) == 1
    found = plain(logits, target)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_loss_module_runs_on_the_meta_device_as_a_planner_runs_it() -> None:
    loss = nn.CrossEntropyLoss()
    fuse_model(loss)
    logits = torch.empty(2, 3, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = loss(logits, torch.zeros(2, dtype=torch.int64, device="meta"))
    assert found.shape == () and found.dtype == torch.bfloat16
