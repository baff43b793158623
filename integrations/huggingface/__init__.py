"""lowtide for Hugging Face: Trainer, Accelerator, and weights that stream from model folders."""

from .accelerator import Accelerator
from .arguments import Seq2SeqTrainingArguments, TrainingArguments
from .streaming import from_pretrained, streaming
from .trainer import LowtideMixin, Seq2SeqTrainer, Trainer

__all__ = [
    "Accelerator",
    "LowtideMixin",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "from_pretrained",
    "streaming",
]
