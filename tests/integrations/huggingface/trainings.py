"""Small trainings with the Trainer, on ranks: with lowtide, and without it as DistributedDataParallel has them."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import lowtide.huggingface
from tests.kit.hugging_face import NUM_TOKENS, small
from tests.kit.training import rank_and_world

LENGTH = 6
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def llama(**sizes: Any) -> nn.Module:
    torch.manual_seed(5)
    return small("LlamaForCausalLM", **SIZES | sizes)


def mixtral() -> nn.Module:
    torch.manual_seed(5)
    return small("MixtralForCausalLM", num_local_experts=4, **SIZES)


def adapted() -> nn.Module:
    message = "`is_gradient_checkpointing` is deprecated"  # of transformers, for what peft still asks by the older name
    warnings.filterwarnings("ignore", message, FutureWarning, "peft.peft_model|transformers.modeling_utils")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.2))


class Sentences(Dataset[dict[str, Any]]):
    """Tokens, some of which are no labels, so that ranks have different numbers of them."""

    def __init__(self, count: int = 24, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(1, NUM_TOKENS, (count, LENGTH), generator=generator)
        self._hidden = torch.randint(0, LENGTH - 2, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._tokens[index].tolist()
        hidden = self._hidden[index]
        return {"input_ids": tokens, "labels": [-100] * hidden + tokens[hidden:]}


@dataclass
class Outcome:
    """What a training has given on a rank."""

    history: list[dict[str, float]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    result: Any = None

    def logged(self, key: str) -> list[float]:
        return [entry[key] for entry in self.history if key in entry]


def arguments(folder: str, **options: Any) -> dict[str, Any]:
    """Of TrainingArguments: three steps on two ranks, each logged."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
        **options,
    }


def trainer(
    folder: str, config: Any, options: dict[str, Any] | None = None, kind: type[Any] = object, **given: Any
) -> Any:
    """A Trainer; config: of lowtide, None for transformers' own Trainer. kind: a class that comes before it."""
    args = transformers.TrainingArguments(**arguments(folder, **(options or {})))
    own = transformers.Trainer if config is None else lowtide.huggingface.Trainer
    cls = own if kind is object else type(kind.__name__, (kind, own), {})
    if config is not None:
        given["lowtide"] = config
    given = {"train_dataset": Sentences(), "eval_dataset": Sentences(10, 8), "data_collator": padded, **given}
    if "model_init" not in given:
        given.setdefault("model", llama())
    return cls(args=args, **given)


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def stage(number: int, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number}, **sections}


def full_state(trainer: Any) -> dict[str, Tensor]:
    """All parameters and buffers, on rank 0."""
    engine = getattr(trainer, "engine", None)
    state = trainer.model.state_dict() if engine is None else engine.state_dict()
    return {name: value.clone() for name, value in state.items()}


def outcome_of(trainer: Any, result: Any = None) -> Outcome:
    return Outcome(trainer.state.log_history, full_state(trainer), result)


def closed(trainer: Any) -> None:
    """Ends the engines of a Trainer, so that the next one of this process begins anew."""
    if getattr(trainer, "engine", None) is not None:
        trainer.accelerator.release()


def trained(
    folder: str, config: Any, options: dict[str, Any], resume: str | None = None, saves: bool = False, **given: Any
) -> Outcome:
    """Of a whole training, as `trainer` makes it. resume: a checkpoint. saves: the model, in folder/model."""
    made = trainer(folder, config, options, **given)
    outcome = outcome_of(made, made.train(resume_from_checkpoint=resume))
    if saves:
        made.save_model(f"{folder}/model")
    closed(made)
    return outcome


def is_first() -> bool:
    """Whether this is rank 0, which alone has the whole weights."""
    return rank_and_world()[0] == 0


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference between weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def differences(one: Outcome, other: Outcome) -> float:
    """The largest in losses, norms and learning rates of the log, and in the weights."""
    keys = ("loss", "grad_norm", "learning_rate", "train_loss", "total_flos")
    numbers = [abs(a - b) for key in keys for a, b in zip(one.logged(key), other.logged(key), strict=True)]
    assert one.logged("loss")
    return max([*numbers, apart(one.state, other.state)])
