"""Which hooks run on a stage: those of its own blocks, as often as in the whole model, and of no others."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.kit import models
from tests.pipe.staged import stages_of

TOKENS = models.token_batch(0, 2)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return models.TinyGPT(layers=4)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_hooks_of_skipped_blocks_and_of_those_behind_do_not_run(num_stages: int) -> None:
    seen: list[tuple[int, str, str]] = []
    carried = None
    for stage in stages_of(gpt, num_stages):
        for name in stage.plan.blocks:
            block = stage.module.get_submodule(name)
            note = partial(lambda index, name, when, *args: seen.append((index, name, when)), stage.index, name)
            block.register_forward_pre_hook(partial(note, "before"))
            block.register_forward_hook(partial(note, "after"))
        carried = stage.run(lambda model: model(*TOKENS), carried)
    each = 4 // num_stages
    assert seen == [(number // each, f"blocks.{number}", when) for number in range(4) for when in ("before", "after")]


def test_hooks_of_the_first_block_see_what_was_received() -> None:
    first, second = stages_of(gpt, 2)
    output = first.run(lambda model: model(*TOKENS))
    seen: list[Tensor] = []
    second.module.get_submodule("blocks.2").register_forward_pre_hook(lambda module, args: seen.extend(args))
    second.run(lambda model: model(*TOKENS), output)
    (x,) = seen
    assert x is output.tensors[0]


def test_the_root_is_left_without_its_forward_hooks_except_on_the_last_stage() -> None:
    seen: list[int] = []
    carried = None
    for stage in stages_of(gpt, 2):
        stage.module.register_forward_hook(lambda module, args, output, index=stage.index: seen.append(index))
        carried = stage.run(lambda model: model(*TOKENS), carried)
    assert seen == [1]


def test_a_compiled_block_is_called_in_its_place() -> None:
    calls: list[int] = []

    def build() -> nn.Module:
        model = gpt()
        for number, block in enumerate(model.get_submodule("blocks").children()):
            forward = block._call_impl

            def compiled(x: Tensor, number: int = number, forward: Callable[[Tensor], Tensor] = forward) -> Tensor:
                calls.append(number)
                return forward(x)

            block._compiled_call_impl = compiled  # what block.compile() sets
        return model

    first, second = stages_of(build, 2)
    second.run(lambda model: model(*TOKENS), first.run(lambda model: model(*TOKENS)))
    assert calls == [0, 1, 2, 3]
