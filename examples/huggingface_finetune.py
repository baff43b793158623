"""Fine-tunes a causal language model with the Trainer of Hugging Face, over lowtide.

    python examples/huggingface_finetune.py --output_dir runs/tuned --lowtide zero3
    lowtide launch --nproc 2 examples/huggingface_finetune.py --output_dir runs/tuned --lowtide zero3 --bf16
    lowtide launch --nproc 2 examples/huggingface_finetune.py --output_dir runs/tuned --lowtide zero3 \\
        --model runs/tuned --data my_text.txt --eval_strategy epoch

Without --model a small Llama over bytes begins anew; without --data it learns the text of Python's standard library.
Every other argument is one of transformers.TrainingArguments.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from text_data import read_bytes, stdlib_files
from torch.utils.data import Dataset

from lowtide.huggingface import Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    """What this script needs beside the arguments of the Trainer."""

    model: str | None = None  # a folder that save_pretrained has written
    data: str | None = None  # a text file
    context: int = 64  # bytes that the model sees
    pieces: int = 512  # of the text, to train on


class Pieces(Dataset[dict[str, Any]]):
    """Pieces of a text, each of `context` bytes; the model predicts each byte from those before it."""

    def __init__(self, text: torch.Tensor, context: int, count: int) -> None:
        self._rows = text[: len(text) // context * context].view(-1, context)[:count].long()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def small_llama(context: int) -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=context, **sizes)
    return transformers.LlamaForCausalLM(config)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains, evaluates and saves; returns what the last evaluation has found."""
    kinds: Any = (ScriptArguments, TrainingArguments)
    parser = transformers.HfArgumentParser(kinds)
    script, arguments = parser.parse_args_into_dataclasses(argv)
    transformers.set_seed(arguments.seed)  # the same model on every rank
    text = read_bytes([Path(script.data)] if script.data else stdlib_files()[:20])
    pieces = Pieces(text, script.context, script.pieces)
    held_back = max(1, len(pieces) // 10)
    train, validation = torch.utils.data.random_split(pieces, [len(pieces) - held_back, held_back])
    if script.model is None:
        model = small_llama(script.context)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(script.model)

    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=validation)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"validation loss {metrics['eval_loss']:.3f}; the model is in {arguments.output_dir}")
    return metrics


if __name__ == "__main__":
    main()
