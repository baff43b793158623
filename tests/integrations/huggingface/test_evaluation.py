"""Evaluation, prediction and generation with a Trainer over an engine, before, in and after a training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lowtide.huggingface
from tests.integrations.huggingface.trainings import (
    NUM_TOKENS,
    Sentences,
    arguments,
    closed,
    full_state,
    llama,
    padded,
    stage,
    trainer,
)
from tests.kit.ranks import RankPool

TENSOR = {"parallel": {"tensor": 2}}
SOCKETS = {"communication": {"transport": "sockets"}}


def evaluate_around(folder: str, config: Any) -> Any:
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    made = trainer(folder, config, options)
    before = made.evaluate()["eval_loss"]
    if config is None:  # transformers' own Trainer leaves DistributedDataParallel out after that: ranks go apart
        made = trainer(folder, config, options)
    made.train()
    after = made.evaluate()["eval_loss"]
    predicted = made.predict(Sentences(6, 4))
    prompt = torch.tensor([[3, 7, 1 + made.args.process_index]])
    made.model.eval()
    generated = made.model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
    made.train()
    losses = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    result = [before, after, *losses], predicted.predictions, predicted.metrics["test_loss"], generated.tolist()
    state = full_state(made)
    closed(made)
    return result, state


def test_it_evaluates_predicts_and_generates_as_over_ddp(ranks: RankPool, tmp_path: Path) -> None:
    plain = ranks(2, evaluate_around, str(tmp_path), None)
    for number in (0, 3):
        ours = ranks(2, evaluate_around, str(tmp_path), stage(number))
        for (result, _), (expected, _) in zip(ours, plain, strict=True):
            np.testing.assert_allclose(result[0], expected[0], atol=1e-6)
            np.testing.assert_allclose(result[1], expected[1], atol=1e-5)
            assert abs(result[2] - expected[2]) < 1e-6
            assert result[3] == expected[3]
        for name, value in plain[0][1].items():
            torch.testing.assert_close(ours[0][1][name], value, atol=2e-6, rtol=0)


def token_mean(folder: str, config: Any, count: int) -> Any:
    data = Sentences(count, 8)
    kind = lowtide.huggingface.LowtideMixin if config is None else object  # without a config it is transformers' own
    made = trainer(folder, config, {"per_device_eval_batch_size": 3}, kind, eval_dataset=data, eval_token_mean=True)
    losses = made.evaluate()["eval_loss"], made.predict(data).metrics["test_loss"]
    closed(made)
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "config", "count"),
    [(1, stage(0), 10), (2, stage(3), 10), (4, None, 10), (4, stage(0), 10), (4, stage(3), 1), (4, TENSOR, 10)],
    ids=["1 rank", "2 ranks", "DDP", "4 ranks", "one sample", "tensor"],
)
def test_the_mean_over_tokens_is_that_of_one_batch(
    ranks: RankPool, tmp_path: Path, num_ranks: int, config: Any, count: int
) -> None:
    model: Any = llama()
    with torch.no_grad():
        whole = model(**padded([Sentences(count, 8)[index] for index in range(count)])).loss.item()
    for losses in ranks(num_ranks, token_mean, str(tmp_path), config, count):
        assert losses == pytest.approx((whole, whole), abs=1e-6)


def flattened(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([[value for row in rows for value in row[key]]]) for key in rows[0]}


def unlabelled(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": padded(rows)["input_ids"]}


def refuse_the_mean(folder: str, collator: Any) -> str:
    args = lowtide.huggingface.TrainingArguments(**arguments(folder), lowtide=stage(0), eval_token_mean=True)
    made = lowtide.huggingface.Trainer(llama(), args, eval_dataset=Sentences(10, 8), data_collator=collator)
    with pytest.raises(ValueError, match="eval_token_mean") as raised:
        made.evaluate()
    closed(made)
    return str(raised.value)


@pytest.mark.parametrize(
    ("collator", "text"),
    [
        (unlabelled, "expected batches with a tensor of token ids as `labels`"),
        (flattened, "expected a row of labels for each of 8 samples, found shape (1, 48)"),
    ],
    ids=["no labels", "rows in one"],
)
def test_no_mean_over_tokens_that_cannot_be_counted(ranks: RankPool, tmp_path: Path, collator: Any, text: str) -> None:
    assert all(text in found for found in ranks(2, refuse_the_mean, str(tmp_path), collator))


def predict_only(folder: str, config: Any) -> Any:
    made = trainer(folder, config, {"bf16": True, "bf16_full_eval": True}, train_dataset=None)
    made.accelerator.prepare_model(llama())  # as a reference model; it changes nothing
    result = made.evaluate()["eval_loss"], made.predict(Sentences(6, 4)).predictions
    held = {type(param).__name__ for param in made.model.parameters()}
    closed(made)
    return *result, held


def test_without_a_training_the_model_is_divided_too(ranks: RankPool, tmp_path: Path) -> None:
    first, other = (ranks(2, predict_only, str(tmp_path), {**stage(number), **SOCKETS})[0] for number in (0, 3))
    assert first[0] == other[0]
    assert np.array_equal(first[1], other[1])
    assert (first[2], other[2]) == ({"Parameter"}, {"ReleasedParameter"})


class Stops(transformers.TrainerCallback):
    """Sees the optimizer and the model of each step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(f"{type(given['model']).__name__} {given['optimizer'].param_groups[0]['lr']:.4f}")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return control


def constant(predictions: Any) -> dict[str, float]:
    return {"worth": 0.0}


def stop_early(folder: str, config: Any) -> Any:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "best",
        "metric_for_best_model": "worth",
        "num_train_epochs": 4,
        "load_best_model_at_end": True,
    }
    seen = Stops()
    callbacks = [transformers.EarlyStoppingCallback(early_stopping_patience=2), seen]
    made = trainer(folder, config, options, compute_metrics=constant, callbacks=callbacks)
    made.train()
    closed(made)
    return made.state.global_step, seen.seen, made.state.best_model_checkpoint


def test_callbacks_see_the_steps_and_stop_early(ranks: RankPool, tmp_path: Path) -> None:
    steps, seen, best = ranks(2, stop_early, str(tmp_path), stage(3))[0]
    plain_steps, plain_seen, _ = ranks(2, stop_early, str(tmp_path / "plain"), None)[0]
    assert (steps, seen) == (plain_steps, plain_seen)
    assert steps == 3
    assert best == str(tmp_path / "checkpoint-1")


def translate(folder: str, number: int) -> Any:
    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=NUM_TOKENS, **sizes))
    options = {"predict_with_generate": True, "generation_max_length": 5, "max_steps": 2}
    args = lowtide.huggingface.Seq2SeqTrainingArguments(**arguments(folder, **options), lowtide=stage(number))
    made = lowtide.huggingface.Seq2SeqTrainer(
        model, args, train_dataset=Sentences(), eval_dataset=Sentences(5, 8), data_collator=padded
    )
    made.train()
    predicted = made.predict(Sentences(5, 8))
    closed(made)
    assert predicted.metrics is not None
    return predicted.predictions, predicted.metrics["test_loss"]


def test_predictions_are_generated_on_all_ranks_in_step(ranks: RankPool, tmp_path: Path) -> None:
    first, other = (ranks(2, translate, str(tmp_path), number)[0] for number in (0, 3))
    assert np.array_equal(first[0], other[0])
    assert first[1] == other[1]


def generate_apart() -> Any:
    accelerator = lowtide.huggingface.Accelerator(lowtide={**stage(3), **SOCKETS})
    plain: Any = llama()
    engine = accelerator.prepare(llama())
    prompt, length = torch.tensor([[3, 7]]), 3 + 4 * accelerator.process_index
    wanted, found = (one.generate(prompt, max_new_tokens=length, eos_token_id=None) for one in (plain, engine.module))
    total = accelerator.reduce(torch.ones(1))  # where rank 1 still generates, rank 0 is here
    accelerator.release()
    return wanted.tolist() == found.tolist(), total.item()


def test_ranks_that_generate_more_and_fewer_tokens_stay_in_step(ranks: RankPool) -> None:
    assert ranks(2, generate_apart) == [(True, 2.0)] * 2


def train_twice(folder: str) -> Any:
    made = trainer(folder, stage(3), {"max_steps": 1}, model_init=llama)
    losses = []
    teacher = made.accelerator.prepare_model(llama())
    made.create_accelerator_and_postprocess()  # as another trial of a search does
    for _ in range(2):
        made.train()
        losses.append(made.state.log_history[0]["loss"])
    count = len(made.accelerator.engines)
    output = teacher(torch.tensor([[3, 7]])).logits
    made.end()
    return losses, count, made.engine, output.shape


def test_each_training_may_have_a_model_of_its_own_beside_a_teacher(ranks: RankPool, tmp_path: Path) -> None:
    (first, second), count, engine, shape = ranks(1, train_twice, str(tmp_path))[0]
    assert first == second
    assert count == 2
    assert shape == (1, 2, NUM_TOKENS)
    assert engine is None
