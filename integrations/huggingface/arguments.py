"""TrainingArguments with two more: the config of lowtide, and which mean an evaluation has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

from .processes import only_cpu

HELP = (
    "How lowtide divides the training over the ranks: the name of a preset such as zero3, the path of a JSON file, or "
    "a dictionary."
)

HELP_OF_MEAN = (
    "Whether eval_loss is the mean over all tokens with a label, which is the same on any number of ranks. Else it is "
    "transformers': the mean over batches of each batch's mean."
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """As transformers', with two more.

    lowtide: a preset's name, a path or a dictionary; None: the Trainer is given it. eval_token_mean: `eval_loss` is the
    mean over all tokens with a label, and not over batches of each batch's mean.
    """

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "lowtide"]  # noqa: RUF012 (as the base)

    lowtide: dict[str, Any] | str | None = field(default=None, metadata={"help": HELP})
    eval_token_mean: bool = field(default=False, metadata={"help": HELP_OF_MEAN})

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or only_cpu()
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers has no types for it


@dataclass
class Seq2SeqTrainingArguments(transformers.Seq2SeqTrainingArguments):
    """As transformers', with `lowtide` and `eval_token_mean`; see `TrainingArguments`."""

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "lowtide"]  # noqa: RUF012 (as the base)

    lowtide: dict[str, Any] | str | None = field(default=None, metadata={"help": HELP})
    eval_token_mean: bool = field(default=False, metadata={"help": HELP_OF_MEAN})

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or only_cpu()
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers has no types for it
