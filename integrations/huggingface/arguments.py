"""TrainingArguments with one more: the config of lowtide."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

from .processes import only_cpu

HELP = (
    "How lowtide divides the training over the ranks: the name of a preset such as zero3, the path of a JSON file, or "
    "a dictionary."
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """As transformers', with `lowtide`: a preset's name, a path or a dictionary. None: the Trainer is given it."""

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "lowtide"]  # noqa: RUF012 (as the base)

    lowtide: dict[str, Any] | str | None = field(default=None, metadata={"help": HELP})

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or only_cpu()
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers has no types for it


@dataclass
class Seq2SeqTrainingArguments(transformers.Seq2SeqTrainingArguments):
    """As transformers', with `lowtide`; see `TrainingArguments`."""

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "lowtide"]  # noqa: RUF012 (as the base)

    lowtide: dict[str, Any] | str | None = field(default=None, metadata={"help": HELP})

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or only_cpu()
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers has no types for it
