"""LoRA on a Hugging Face model at stage 3: the weights stream in from its folder, and adapters come out.

    lowtide launch --nproc 2 examples/lora.py --model FOLDER --text book.txt --out tuned

Started again with the same --out it goes on where its last checkpoint was made. tuned/adapter is what
`PeftModel.from_pretrained` reads, tuned/merged what `AutoModelForCausalLM.from_pretrained` does.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowtide
from lowtide.huggingface import from_pretrained


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="what to learn")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints, the adapter and the merged model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step over all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    options = parser.parse_args()
    if not any(options.model.glob("tokenizer*")) and not any(options.model.glob("vocab.*")):
        parser.error(f"--model: expected a folder with a tokenizer, found none in {options.model}; save it there too")
    return options


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_batch_size": options.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "adamw", "params": {"lr": options.lr, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"every": 1},
        "checkpoint": {
            "folder": str(options.out / "checkpoints"),
            "every_steps": options.save_every,
            "keep_last": 2,
            "exclude_frozen_parameters": True,  # the base is in options.model
        },
        "seed": 0,
    }


def batch_of(tokens: Tensor, step: int, options: argparse.Namespace, engine: lowtide.Engine) -> dict[str, Tensor]:
    """This rank's rows of the step's global batch, the same at every number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - options.length, (options.batch,), generator=generator)
    rows = torch.stack([tokens[start : start + options.length] for start in starts.tolist()])
    own = rows.chunk(engine.data_size)[engine.data_rank]
    return {"input_ids": own, "labels": own}


def main() -> None:
    options = arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"])

    def build() -> Any:
        model = from_pretrained(AutoModelForCausalLM, options.model, dtype=torch.bfloat16)
        adapters = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, adapters)

    with lowtide.initialize(build, config_of(options)) as engine:
        engine.train()  # from_pretrained gives a model in eval mode
        with suppress(lowtide.NoCheckpointError):
            engine.load_checkpoint(options.out / "checkpoints")
        for step in range(engine.global_step, options.steps):
            engine.train_step(batch_of(tokens, step, options, engine))
        engine.export(options.out / "adapter", adapters_only=True)
        engine.export(options.out / "merged", merged=True)
    if engine.rank == 0:
        tokenizer.save_pretrained(options.out / "merged")


if __name__ == "__main__":
    main()
