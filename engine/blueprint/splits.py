"""Which parts of a model are on different ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...parallel.experts import ExpertPlan
from ...parallel.plan import TensorPlan
from ...pipe.split.split import SplitPlan
from ..config.config import Config
from .pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class Splits:
    """Stages of it, parts of its layers, some of its experts. Each None: all ranks have all of them."""

    pipeline: PipelinePlan | None  # as its first place sees it
    tensor: TensorPlan | None
    experts: ExpertPlan | None

    @classmethod
    def of(
        cls, config: Config, model: nn.Module, split: SplitPlan | PipelinePlan | None, tensor: TensorPlan | None
    ) -> Splits:
        """split, tensor: as `Blueprint.of` takes them. Raises ValueError where the model cannot be split so."""
        pipeline = None
        if config.has_stages:
            known = split if isinstance(split, PipelinePlan) else PipelinePlan.of(config, model, split)
            pipeline = known.for_stage(config)
        parallel = config.parallel
        if parallel.tensor > 1 and tensor is None:
            tensor = TensorPlan.of(model, parallel.tensor, config.tensor_parallel.plan, parallel.tensor_sequence)
        experts = ExpertPlan.of(model, parallel.expert) if parallel.expert > 1 else None
        return cls(pipeline, tensor, experts)

    @property
    def degrees(self) -> tuple[int, int]:
        """Over how many ranks layers and experts are split."""
        return 1 if self.tensor is None else self.tensor.degree, 1 if self.experts is None else self.experts.degree
