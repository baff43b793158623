"""Small models of the families that `fuse_model` knows."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.kit.hugging_face import NUM_TOKENS, gpt2_dropout, small

llama = partial(small, "LlamaForCausalLM")
CAUSAL_LMS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "mistral": partial(small, "MistralForCausalLM", head_dim=8),
    "qwen2": partial(small, "Qwen2ForCausalLM"),
    "qwen3": partial(small, "Qwen3ForCausalLM", head_dim=8),
    "gemma": partial(small, "GemmaForCausalLM", head_dim=8),
    "gemma2": partial(small, "Gemma2ForCausalLM", head_dim=8, final_logit_softcapping=0.5),  # so low that it matters
    "gpt2": partial(small, "GPT2LMHeadModel", **gpt2_dropout(0.0)),
}
mixtral = partial(small, "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)


class Classifier(nn.Module):
    """Torch's own norm and loss."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.RMSNorm(7, elementwise_affine=affine)
        self.last = nn.Linear(7, 4)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # (rows, 5), (rows,)
        loss: Tensor = self.loss(self.last(self.norm(self.first(x)).tanh()), labels)
        return loss


def token_batch(generator: torch.Generator, rows: int = 2, length: int = 7) -> dict[str, Tensor]:
    """The labels of some tokens are ignored."""
    tokens = torch.randint(NUM_TOKENS, (rows, length), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) < 0.3
    ignored[:, -1] = False
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}
