"""The mixin before the trainers of trl, which the extra of the tests installs."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.huggingface import LowtideMixin
from tests.integrations.huggingface.trainings import Outcome, Sentences, apart, closed, llama, outcome_of, stage
from tests.kit.hugging_face import NUM_TOKENS
from tests.kit.ranks import RankPool

trl: Any = pytest.importorskip("trl", reason="trl is not installed: pip install trl datasets")


def text(index: int, length: int = 3) -> str:
    return " ".join(f"w{token}" for token in Sentences(40)[index]["input_ids"][:length])


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(tokens) % 7) for tokens in completion_ids]


def sentence(index: int) -> dict[str, Any]:
    return {"input_ids": Sentences()[index]["input_ids"]}


def preference(index: int) -> dict[str, Any]:
    return {"prompt": text(index), "chosen": " " + text(index + 1, 2 + index % 2), "rejected": " " + text(index + 2)}


def judged(index: int) -> dict[str, Any]:
    return {"prompt": text(index), "completion": " " + text(index + 1, 2 + index % 2), "label": index % 3 > 0}


def prompt(index: int) -> dict[str, Any]:
    return {"prompt": text(index)}


@dataclass(frozen=True)
class Case:
    """A trainer of trl, by its name, and what it is given beside the model."""

    name: str
    row: Callable[[int], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    model: str = "LlamaForCausalLM"
    judge: str | None = None  # the class of a reward model, in the place of the function


def write(folder: Path, case: str) -> None:
    """The model and the rows: trl reads its reference from the model's folder, ranks share what they compute."""
    import datasets

    model: Any = llama()
    model.save_pretrained(folder / "model")
    datasets.Dataset.from_list([CASES[case].row(index) for index in range(24)]).save_to_disk(folder / "rows")


SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_accumulation_steps": 2}
ROLLOUTS = {"num_generations": 4, "max_completion_length": 6, "generation_kwargs": {"eos_token_id": [*range(45), 60]}}
CASES = {
    "SFT": Case("SFT", sentence, SKIP),
    "DPO, precomputed": Case("DPO", preference, {"precompute_ref_log_probs": True}),
    "DPO, LoRA": Case("DPO", preference, lora=True),
    "DPO, synchronized": Case("DPO", preference, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "KTO": Case("KTO", judged),
    "Reward": Case("Reward", preference, model="LlamaForSequenceClassification"),
    "RLOO": Case("RLOO", prompt, {**ROLLOUTS, "beta": 0.1}),
    "GRPO": Case("GRPO", prompt, {**ROLLOUTS, "beta": 0.1}, judge="LlamaForSequenceClassification"),
}


def tune(folder: str, config: dict[str, Any] | None, case: str) -> Outcome:
    import datasets
    import peft
    import tokenizers
    import transformers

    given = CASES[case]
    deprecated = r"`(is_)?gradient_checkpointing\w*` is deprecated"  # trl uses the older names
    warnings.filterwarnings("ignore", deprecated, FutureWarning)
    words = {f"w{index}": index for index in range(NUM_TOKENS - 2)} | {"<pad>": NUM_TOKENS - 2, "<eos>": NUM_TOKENS - 1}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")
    args = getattr(trl, f"{given.name}Config")(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.5,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **given.options,
    )
    base = getattr(trl, f"{given.name}Trainer")
    kind = base if config is None else type("Tuner", (LowtideMixin, base), {})
    more: dict[str, Any] = {} if config is None else {"lowtide": config}
    if given.row is prompt:
        more["reward_funcs"] = reward
    torch.manual_seed(3)  # of heads that the folder does not have
    if given.judge is not None:
        judge = getattr(transformers, given.judge).from_pretrained(f"{folder}/model", num_labels=1)
        more |= {"reward_funcs": judge, "reward_processing_classes": tokenizer}
    if given.lora:
        more["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = getattr(transformers, given.model).from_pretrained(f"{folder}/model", num_labels=1)
    rows = datasets.load_from_disk(f"{folder}/rows")
    made = kind(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **more)
    made.train()
    outcome = outcome_of(made)
    closed(made)
    return outcome


def assert_as_over_ddp(ours: Outcome, plain: Outcome) -> None:
    for key in ("loss", "grad_norm", "num_tokens", "mean_token_accuracy", "kl", "reward", "rewards/margins"):
        assert ours.logged(key) == pytest.approx(plain.logged(key), abs=1e-5), key
    assert apart(ours.state, plain.state) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_trainers_are_as_over_ddp(ranks: RankPool, tmp_path: Path, case: str) -> None:
    write(tmp_path, case)
    plain, ours = (ranks(2, tune, str(tmp_path), config, case)[0] for config in (None, stage(3)))
    assert_as_over_ddp(ours, plain)


def test_ranks_that_share_layers_fine_tune_as_one_process(ranks: RankPool, tmp_path: Path) -> None:
    whole = {"plan": {"lm_head": "whole"}}  # trl multiplies by the weight itself, of which a rank would have a part
    write(tmp_path, "SFT")
    plain = ranks(1, tune, str(tmp_path), None, "SFT")[0]
    ours = ranks(2, tune, str(tmp_path), {"parallel": {"tensor": 2}, "tensor_parallel": whole}, "SFT")[0]
    assert_as_over_ddp(ours, plain)
