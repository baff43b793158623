"""What an engine offers to loops that call forward, backward and step themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..comm import Mesh
from ..model.compiled import refuse_to_be_traced
from .blueprint.axes import EXPERT, SEQUENCE
from .config.config import Config
from .step.driver import Driver
from .step.join import NO_JOIN, NO_JOIN_BY_LAYERS, NO_JOIN_OF_EXPERTS, Call
from .step.step_gradients import StepGradients
from .step.step_result import StepResult
from .step.step_sums import mean_over_ranks
from .step.steps import Steps
from .step.turn import Turn, in_turn


class LoopCalls:
    """Whose gradients count, which backward is the last of its step, and what ranks agree on."""

    config: Config
    module: nn.Module
    _mesh: Mesh
    _turn: Turn
    _steps: Steps
    _driver: Driver
    _gradients: StepGradients

    def _step(self, by_hand: bool = False) -> StepResult:
        """The update of a step that is complete."""
        raise NotImplementedError

    @in_turn
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function(*args, **kwargs)` returns, all of which is one forward of the engine.

        For trainers whose step calls the model, or parts of it, as it likes, and computes the loss itself: a method of
        the module, as Lightning's `training_step`. Inputs are passed as they are: on the device and in the dtype that
        the model computes in. Ranks that share layers (parallel.tensor) are given the same. Raises ValueError with
        parallel.pipeline, sequence and tensor_sequence, where a rank has a part of the model or of its inputs.
        """
        refuse_to_be_traced("an engine")
        parallel = self.config.parallel
        if parallel.sequence > 1 or parallel.tensor_sequence:
            found = "sequence" if parallel.sequence > 1 else "tensor_sequence"
            raise ValueError(
                f"engine.run(): expected a config without parallel.{found}, whose ranks have parts of the inputs, "
                "found it; call engine(...) with the inputs of the model"
            )
        with self._mesh.raised.passes():
            return self._driver.run(self._steps, function, args, kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, whose `backward()` is that of the engine: with float16's loss scale from the loss on, and with the
        loss in the result of the step. Its value is that of `loss`. Raises ValueError for what is no loss, ().
        """
        return self._driver.scale(self._steps, loss)

    def sequence_part(self, x: Tensor, fill: float = 0) -> Tensor:
        """This rank's part of x, (rows, tokens, ...), where ranks share sequences (`parallel.sequence`); else x.

        What `engine(...)` returns stands beside it: with it a loop computes a loss of its own from the part's logits.
        Labels are to stand where they are predicted (shifted by one, -100 for none). fill: of the tokens that are added
        where the ranks do not divide them. Ask for it before the forward, which needs no labels then.
        """
        return self._driver.model_call.own(x, fill)

    @in_turn
    def whole_output(self, output: Any, tokens: int) -> Any:
        """What `engine(...)` has returned, as one process has it, without gradients: for metrics and predictions.

        Logits of `parallel.tensor` that are in parts come as a tensor; of `parallel.sequence`, what has a rank's tokens
        along dimension 1 has those of all, and a loss, (), is the sum of the ranks' parts. Anything else is as it is.
        tokens: of the whole sequences, in dimension 1. Ranks that are given the same batch must all call it.
        """
        return self._driver.model_call.whole_output(output, tokens)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards are not the last of their step: `accumulate(last=False)`, as DDP calls it."""
        return self.accumulate(last=False)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """A context that says whether its backwards are the last of their step, after which `step` acts.

        For loops that count by themselves; a backward outside of any is then the last. Gradients are divided by
        gradient_accumulation_steps all the same: leave it at 1 and weigh the losses.
        """
        return self._steps.so_far.accumulate(last)

    @property
    def microbatches_done(self) -> int:
        """How many backwards there were since the last step; without any `step` is an error."""
        return self._steps.so_far.num_microbatches

    @property
    def is_step_complete(self) -> bool:
        """Whether the last backward was the last of its step, so that `step` updates."""
        return self._steps.so_far.is_complete

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards may be the last of their step. As DDP's: it may be set before each forward, in the
        place of `accumulate(last=...)`. False holds until it is set again, True until the step has ended."""
        return self._steps.so_far.may_be_last

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._steps.so_far.say(last=bool(value))

    def count_by(self, is_last: Callable[[], bool], accumulation: int) -> None:
        """From now on `is_last()` says before each backward, `loss.backward()` too, whether it is the last of its step.

        For loops that count by calls of their own. accumulation: the microbatches of a step, for messages; gradients
        are divided as the config says.
        """
        self._steps.so_far.count_by(is_last, accumulation)

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what the backwards since the last step have added up, on all ranks; `step` does so by itself."""
        if self._steps.so_far.num_microbatches:
            self._steps.join.check_outside("engine.zero_grad() in the middle of a step")
        self._steps.refuse_more("engine.zero_grad()")
        self._steps.forget(ends_graphs=False)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A context in which no parameter of the engine requires a gradient; that of its inputs is computed."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in trained:
                param.requires_grad_(True)

    @contextmanager
    def join(self) -> Iterator[None]:
        """For data that end earlier on some ranks: who leaves the loop goes on at the end of the context, without data.

            with engine.join():
                for batch in loader:  # of another length on each rank
                    engine.train_step(batch)

        Ranks without data take part in the steps of the others until all have run out. Gradient and loss are the mean
        over the microbatches that there were. All ranks must enter it; `train_step`, forward, `backward`,
        `clip_grad_norm_`, `step`, `eval_step` and `agree` may be in it, and what the config saves. Raises ValueError
        over a pipeline, layer by layer, or where ranks share layers, sequences or experts, StateError for other calls
        of all ranks in it, for those of other engines, and where another engine's is open.
        """
        self._turn.check("engine.join()")
        if not self._mesh.has_whole or self._mesh.axes[SEQUENCE].size > 1:
            raise ValueError(NO_JOIN)
        if self._mesh.axes[EXPERT].size > 1:
            raise ValueError(NO_JOIN_OF_EXPERTS)
        if self.config.zero_optimization.layered_gradient_accumulation:
            raise ValueError(NO_JOIN_BY_LAYERS)
        with self._mesh.raised.call("engine.join()", is_context=True), self._steps.join.opened():
            yield
            with self._turn.of("engine.join()"):
                for call in self._steps.join.calls_without_data():
                    self._take_part(call)

    def _take_part(self, call: Call) -> None:
        if call is Call.STEP:
            self._step()
        elif call is Call.CLIPPING:
            self._gradients.clip_without_data()
        elif call is Call.TAKING_BACK:
            self._steps.take_back()
        elif call is Call.EVALUATION:
            mean_over_ranks(self._mesh, [], self._mesh.world.size)
        elif call is Call.AGREEMENT:
            self._count(False)
        else:
            self._driver.take_part(self._steps, call)

    @in_turn
    def agree(self, flag: bool | Tensor, how: Literal["any", "all"] = "any") -> bool:
        """Whether `flag` is true on any rank, or on all of them: the same answer everywhere. All ranks must call it.

        if engine.agree(loss < best_so_far + 0.01):  # some rank wants to stop: all do
            break
        """
        if how not in ("any", "all"):
            raise ValueError(f'engine.agree: expected how="any" or "all", found {how!r}')
        with self._steps.join.together(Call.AGREEMENT) as num_ranks:
            count = self._count(bool(flag))
        return count == num_ranks if how == "all" else count > 0

    def _count(self, flag: bool) -> int:
        """On how many ranks. A collective."""
        mine = torch.tensor([flag], dtype=torch.int64, device=self._mesh.world.device)
        return int(self._mesh.sum_small(mine, "engine.agree()"))
