"""The mixin before a trainer of trl, which the extra of the tests installs."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from lowtide.huggingface import LowtideMixin
from tests.integrations.huggingface.trainings import NUM_TOKENS, Outcome, Sentences, closed, llama, outcome_of, stage
from tests.ranks import RankPool

trl: Any = pytest.importorskip("trl", reason="trl is not installed: pip install trl datasets")


def tune(folder: str, config: dict[str, Any] | None) -> Outcome:
    import datasets
    import tokenizers
    import transformers

    text = "`gradient_checkpointing` is deprecated"  # trl sets it, by the older name
    warnings.filterwarnings("ignore", text, FutureWarning)
    words = {f"w{index}": index for index in range(NUM_TOKENS - 2)} | {"<pad>": NUM_TOKENS - 2, "<eos>": NUM_TOKENS - 1}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    rows = datasets.Dataset.from_list([{"input_ids": Sentences()[index]["input_ids"]} for index in range(24)])
    args = trl.SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.5,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    kind = trl.SFTTrainer if config is None else type("Tuner", (LowtideMixin, trl.SFTTrainer), {})
    given: dict[str, Any] = {} if config is None else {"lowtide": config}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")
    made = kind(model=llama(), args=args, train_dataset=rows, processing_class=tokenizer, **given)
    made.train()
    outcome = outcome_of(made)
    closed(made)
    return outcome


# trl multiplies by the head's weight itself, of which a rank would have a part.
TENSOR = {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": {"lm_head": "whole"}}}


@pytest.mark.parametrize("config", [stage(3), TENSOR], ids=["stage 3", "tensor"])
def test_fine_tuning_is_as_over_ddp(ranks: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    plain = ranks(1 if "parallel" in config else 2, tune, str(tmp_path), None)[0]
    ours = ranks(2, tune, str(tmp_path), config)[0]
    assert ours.logged("num_tokens") == plain.logged("num_tokens")
    assert ours.logged("loss") == pytest.approx(plain.logged("loss"), abs=1e-6)
    assert ours.logged("mean_token_accuracy") == plain.logged("mean_token_accuracy")
    assert max(float((ours.state[key] - value).abs().max()) for key, value in plain.state.items()) < 1e-6
