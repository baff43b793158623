"""Evaluation, prediction and generation with a Trainer over an engine, before, in and after a training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lowtide.huggingface
from tests.integrations.huggingface.trainings import (
    Sentences,
    apart,
    arguments,
    closed,
    full_state,
    llama,
    padded,
    stage,
    trainer,
)
from tests.kit.hugging_face import NUM_TOKENS
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal

TENSOR = {"parallel": {"tensor": 2}}
SOCKETS = {"communication": {"transport": "sockets"}}


def evaluate_around(folder: str, config: Any) -> Any:
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    made = trainer(folder, config, options)
    losses = [made.evaluate()["eval_loss"]]
    if config is None:  # transformers' own Trainer leaves DistributedDataParallel out after that: ranks go apart
        made = trainer(folder, config, options)
    made.train()
    losses.append(made.evaluate()["eval_loss"])
    predicted = made.predict(Sentences(6, 4))
    prompt = torch.tensor([[3, 7, 1 + made.args.process_index]])
    made.model.eval()
    generated = made.model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
    made.train()
    losses += [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    state = full_state(made)
    closed(made)
    return [*losses, predicted.metrics["test_loss"]], predicted.predictions, generated.tolist(), state


def test_it_evaluates_predicts_and_generates_as_over_ddp(ranks: RankPool, tmp_path: Path) -> None:
    plain = ranks(2, evaluate_around, str(tmp_path), None)
    ours = ranks(2, evaluate_around, str(tmp_path), stage(3))
    for found, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
        assert found[2] == expected[2]
    assert apart(ours[0][3], plain[0][3]) < 2e-6


@pytest.mark.parametrize(
    ("num_ranks", "config", "count"),
    [(1, stage(0), 10), (4, None, 10), (4, stage(3), 1), (4, TENSOR, 10)],
    ids=["1 rank", "DDP", "one sample", "tensor"],
)
def test_the_mean_over_tokens_is_that_of_one_batch(
    ranks: RankPool, tmp_path: Path, num_ranks: int, config: Any, count: int
) -> None:
    ranks(num_ranks, token_mean, str(tmp_path), config, count)


def token_mean(folder: str, config: Any, count: int) -> None:
    model: Any = llama()
    data = Sentences(count, 8)
    with torch.no_grad():
        whole = model(**padded([data[index] for index in range(count)])).loss.item()
    kind = lowtide.huggingface.LowtideMixin if config is None else object  # without a config it is transformers' own
    made = trainer(folder, config, {"per_device_eval_batch_size": 3}, kind, eval_dataset=data, eval_token_mean=True)
    losses = made.evaluate()["eval_loss"], made.predict(data).metrics["test_loss"]
    closed(made)
    assert losses == pytest.approx((whole, whole), abs=1e-6)


def flattened(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([[value for row in rows for value in row[key]]]) for key in rows[0]}


def unlabelled(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": padded(rows)["input_ids"]}


@on_ranks(2)
@pytest.mark.parametrize(
    ("collator", "said"),
    [
        (unlabelled, "expected batches with a tensor of token ids as `labels`"),
        (flattened, "expected a row of labels for each of 8 samples, found shape (1, 48)"),
    ],
)
def test_no_mean_over_tokens_that_cannot_be_counted(tmp_path: Path, collator: Any, said: str) -> None:
    args = lowtide.huggingface.TrainingArguments(**arguments(str(tmp_path)), lowtide=stage(0), eval_token_mean=True)
    made = lowtide.huggingface.Trainer(llama(), args, eval_dataset=Sentences(10, 8), data_collator=collator)
    found = refusal(made.evaluate)
    closed(made)
    assert "eval_token_mean" in found and said in found


@on_ranks(2)
def test_without_a_training_the_model_is_divided_too(tmp_path: Path) -> None:
    found = []
    for number, held in ((0, "Parameter"), (3, "ReleasedParameter")):
        half = {"bf16": True, "bf16_full_eval": True}
        made = trainer(str(tmp_path), {**stage(number), **SOCKETS}, half, train_dataset=None)
        made.accelerator.prepare_model(llama())  # as a reference model; it changes nothing
        found.append((made.evaluate()["eval_loss"], made.predict(Sentences(6, 4)).predictions.tolist()))
        assert {type(param).__name__ for param in made.model.parameters()} == {held}
        closed(made)
    assert found[0] == found[1]


class Stops(transformers.TrainerCallback):
    """Sees the optimizer and the model of each step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(f"{type(given['model']).__name__} {given['optimizer'].param_groups[0]['lr']:.4f}")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return control


def stop_early(folder: str, config: Any) -> Any:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "worth"}
    options |= {"num_train_epochs": 4, "load_best_model_at_end": True}
    seen = Stops()
    callbacks = [transformers.EarlyStoppingCallback(early_stopping_patience=2), seen]
    made = trainer(folder, config, options, compute_metrics=lambda _: {"worth": 0.0}, callbacks=callbacks)
    made.train()
    closed(made)
    return (made.state.global_step, seen.seen), made.state.best_model_checkpoint


def test_callbacks_see_the_steps_and_stop_early(ranks: RankPool, tmp_path: Path) -> None:
    found, best = ranks(2, stop_early, str(tmp_path), stage(3))[0]
    assert found == ranks(2, stop_early, str(tmp_path / "plain"), None)[0][0]
    assert found[0] == 3 and best == str(tmp_path / "checkpoint-1")


def translate(folder: str, number: int) -> Any:
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"vocab_size": NUM_TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    sizes |= {"num_heads": 2, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    options = {"predict_with_generate": True, "generation_max_length": 5, "max_steps": 2}
    args = lowtide.huggingface.Seq2SeqTrainingArguments(**arguments(folder, **options), lowtide=stage(number))
    made = lowtide.huggingface.Seq2SeqTrainer(
        model, args, train_dataset=Sentences(), eval_dataset=Sentences(5, 8), data_collator=padded
    )
    made.train()
    predicted = made.predict(Sentences(5, 8))
    closed(made)
    assert predicted.metrics is not None
    return np.asarray(predicted.predictions).tolist(), predicted.metrics["test_loss"]


def test_predictions_are_generated_on_all_ranks_in_step(ranks: RankPool, tmp_path: Path) -> None:
    first, other = (ranks(2, translate, str(tmp_path), number)[0] for number in (0, 3))
    assert first == other


@on_ranks(2)
def test_ranks_that_generate_more_and_fewer_tokens_stay_in_step() -> None:
    accelerator = lowtide.huggingface.Accelerator(lowtide={**stage(3), **SOCKETS})
    plain: Any = llama()
    engine = accelerator.prepare(llama())
    prompt, length = torch.tensor([[3, 7]]), 3 + 4 * accelerator.process_index
    wanted, found = (one.generate(prompt, max_new_tokens=length, eos_token_id=None) for one in (plain, engine.module))
    assert accelerator.reduce(torch.ones(1)) == 2  # where rank 1 still generates, rank 0 is here
    accelerator.release()
    assert wanted.tolist() == found.tolist()


@on_ranks(1)
def test_each_training_may_have_a_model_of_its_own_beside_a_teacher(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), stage(3), {"max_steps": 1}, model_init=lambda: llama())
    losses = []
    teacher = made.accelerator.prepare_model(llama())
    made.create_accelerator_and_postprocess()  # as another trial of a search does
    for _ in range(2):
        made.train()
        losses.append(made.state.log_history[0]["loss"])
    assert losses[0] == losses[1] and len(made.accelerator.engines) == 2
    assert teacher(torch.tensor([[3, 7]])).logits.shape == (1, 2, NUM_TOKENS)
    made.accelerator.end_training()  # as Trainer.end, which not all versions have
    assert made.engine is None
