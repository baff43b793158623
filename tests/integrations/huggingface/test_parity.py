"""A Trainer over an engine trains as transformers' own does over DistributedDataParallel, whatever its arguments."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowtide
import lowtide.huggingface
from tests.integrations.huggingface.trainings import (
    Outcome,
    adapted,
    closed,
    differences,
    is_first,
    stage,
    trained,
    trainer,
)
from tests.kit.compiling import with_a_new_compiler
from tests.kit.ranks import RankPool, on_ranks


class Doubles:
    """A loss of one's own, beside the model's; the Trainer is told that it is a mean over the microbatch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class FailsOnce:
    """Runs out of memory with batches of four."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        found: Any = super()
        if len(inputs["input_ids"]) > 2 and self.state.global_step == 1:  # type: ignore[attr-defined]  # the Trainer's
            found.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            raise RuntimeError("CUDA out of memory.")
        return found.training_step(model, inputs, num_items_in_batch)


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


HAS_NEW_NAME = hasattr(transformers.TrainingArguments, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if HAS_NEW_NAME else "gradient_checkpointing"  # of 5.17
CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3},
    "sums in each microbatch": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
    "schedule": {
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "max_grad_norm": 0.0,
    },
    "label smoothing": {"label_smoothing_factor": 0.1, "average_tokens_across_devices": False},
    "checkpointing": {CHECKPOINTING: True, "neftune_noise_alpha": 5.0},
    "own loss": {"kind": Doubles, "gradient_accumulation_steps": 2},
    "loss function": {"compute_loss_func": summed_loss, "gradient_accumulation_steps": 2},
    "batch size": {"kind": FailsOnce, "auto_find_batch_size": True},
    "lora": {"model": adapted},
}
GIVEN = ("kind", "compute_loss_func", "model")  # to the Trainer itself


def train(folder: Path, config: Any, case: dict[str, Any]) -> Outcome:
    case = copy.deepcopy(case)  # accelerate writes into its part
    given = {key: case.pop(key) for key in GIVEN if key in case}
    if "model" in given:
        given["model"] = given["model"]()
    return trained(str(folder), config, case, **given)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_over_ddp_at_every_stage(tmp_path: Path, name: str) -> None:
    stages = (0, 3) if name == "checkpointing" else (3 - list(CASES).index(name) % 4,)
    sections = {"gradient_clipping": "auto"} if name == "accumulation" else {}  # then the engine clips by itself
    # Epsilon well above the last bit of a gradient near zero: AdamW makes a whole step of whatever its sign is.
    case = {"max_steps": 3, "adam_epsilon": 1e-4, **CASES[name]}
    configs = [None, *(stage(number, **sections) for number in stages)]
    plain, *ours = [train(tmp_path, config, case) for config in configs]
    assert not is_first() or max(differences(plain, one) for one in ours) < 1e-6


class Graphs(transformers.TrainerCallback):
    """How many graphs there were after each step, and how often one broke."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))


@on_ranks(2)
def test_torch_compile_is_that_of_blocks_and_makes_nothing_anew(tmp_path: Path) -> None:
    with_a_new_compiler()
    graphs = Graphs()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "num_train_epochs": 2, "eval_strategy": "epoch"}
    made = trainer(str(tmp_path), stage(3), options, callbacks=[graphs])
    made.train()
    assert made.engine.config.compile.blocks
    closed(made)
    assert {breaks for _, breaks in graphs.seen} == {0}
    first, behind = graphs.seen[0], graphs.seen[3]  # the evaluation behind the third step makes a graph of its own
    assert graphs.seen == [first] * 3 + [behind] * 3


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@on_ranks(2)
@pytest.mark.parametrize("precision", HALF)
def test_it_trains_in_16_bits(tmp_path: Path, precision: str) -> None:
    found = train(tmp_path, stage(3), {precision: True, "num_train_epochs": 2})
    if is_first():
        assert found.logged("loss")[-1] < found.logged("loss")[0]
        assert {value.dtype for value in found.state.values()} == {HALF[precision]}


def test_where_the_norm_is_only_looked_at_no_gradient_is_clipped_however_large() -> None:
    """As with max_grad_norm=0: its norm is logged all the same."""
    config = {"optimizer": {"type": "sgd", "params": {"lr": 1.0}}, "steps_per_print": 0}
    with lowtide.initialize(nn.Linear(1, 1, bias=False).double(), config) as engine:
        engine.load_state_dict({"weight": torch.zeros(1, 1)})
        engine.backward(engine(torch.full((1, 1), 1e12, dtype=torch.float64)).sum())
        own: Any = SimpleNamespace(_lowtide=config)
        assert float(lowtide.huggingface.Trainer._get_grad_norm(own, engine)) == 1e12
        engine.step()
        assert float(engine.state_dict()["weight"]) == -1e12


def test_an_optimizer_that_cannot_be_divided_is_refused_before_the_first_step(ranks: RankPool, tmp_path: Path) -> None:
    (failed,) = ranks.fails(1, trained, str(tmp_path), stage(3), {"optim": "adafactor"})
    assert "expected a torch optimizer that updates each element by itself, found Adafactor" in failed.text
