"""Any sequence of an engine's calls computes what the same calls on plain torch do, at any stage and placement.

LOWTIDE_PROGRAMS=1000 pytest tests/laws/test_random_calls.py
"""

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.zero.sequence import StateError
from tests.kit.ranks import RankPool
from tests.kit.training import ROWS, adamw, refusal, settings

WIDTH, WORDS, NUM_CALLS = 6, 11, 20
NUM_PROGRAMS = int(os.environ.get("LOWTIDE_PROGRAMS", "16"))
SIZES = (1, 2, 3, 4)


class Block(nn.Module):
    """Dropped, it returns its input itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH, bias=kind != "recomputed")
        if kind == "with an unused layer":
            self.unused = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, is_dropped: bool = False) -> Tensor:
        if is_dropped:
            return x
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.kind == "recomputed" else self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class Model(nn.Module):
    """May call a block twice, read a block's bias outside of it, tie its head, freeze a weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        kinds = ("plain", "recomputed", "with an unused layer")
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(choose.choice(kinds)) for _ in range(choose.randint(2, 4)))
        self.calls_twice, self.reads_beside, is_tied, is_frozen = (choose.random() < 0.4 for _ in range(4))
        if is_tied:
            self.head.weight = self.embedding.weight
        if is_frozen:
            self.blocks.get_submodule("0.up").requires_grad_(False)
        self.double()

    def forward(self, ids: Tensor, dropped: int = -1) -> Tensor:  # (rows, tokens)
        x = self.embedding(ids)
        for number, block in enumerate([*self.blocks, *self.blocks[: 1 if self.calls_twice else 0]]):
            x = block(x, is_dropped=number == dropped)
        if self.reads_beside:
            x = x + self.get_parameter(f"blocks.{len(self.blocks) - 1}.up.bias").sum()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def config_of(choose: random.Random, size: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": choose.choice([0, 1, 2, 3, 3, 3])}
    more: dict[str, Any] = {
        "gradient_accumulation_steps": choose.choice([1, 1, 2, 3]),
        "gradient_clipping": choose.choice([0.0, 0.5]),
        "activation_checkpointing": {"every": choose.choice([0, 0, 1])},
        "communication": {"transport": choose.choice(["shared_memory", "sockets", "native"])},
        "prescale_gradients": choose.random() < 0.2,
    }
    places: list[dict[str, Any]] = [{}, {"device": "cpu"}, {"device": "nvme", "nvme_path": "states"}]
    zero["offload_optimizer"] = dict(choose.choice(places))
    if choose.random() < 0.2:
        zero["offload_optimizer"]["overlap"] = "speculative"
    elif more["gradient_accumulation_steps"] == 1 and not more["gradient_clipping"]:
        zero["update_in_backward"] = choose.random() < 0.5
    if zero["stage"] == 3 and choose.random() < 0.3:
        zero["stage3_prefetch_bucket_size"] = 0
    if size == 4 and zero["stage"]:
        zero |= choose.choice([{}, {"shard_size": 2}, {"zero_hpz_partition_size": 2} if zero["stage"] == 3 else {}])
    if choose.random() < 0.2:
        zero["units"] = ["blocks.?", "head"]
    return settings(zero["stage"], zero_optimization=zero, **more)


class Both:
    """An engine, and plain torch with the data of all ranks. Each method is a call of both, and compares."""

    def __init__(self, seed: int, size: int) -> None:
        self.choose = random.Random(seed)
        self.config = config_of(self.choose, size)
        self.numbers = torch.Generator().manual_seed(seed)
        self.model = Model(seed)
        self.optimizer = adamw([param for param in self.model.parameters() if param.requires_grad])
        self.engine = lowtide.initialize(Model(seed), self.config)
        self.accumulation: int = self.config["gradient_accumulation_steps"]
        self.num_done = 0
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None

    def batches(self, tokens: int = 3) -> list[Tensor]:
        """(ROWS, tokens) of each rank."""
        shape = (ROWS, tokens)
        return [torch.randint(0, WORDS, shape, generator=self.numbers) for _ in range(self.engine.data_size)]

    def name(self) -> str:
        return self.choose.choice([name for name, _ in self.model.named_parameters()])

    def own(self, values: list[Any]) -> Any:
        return values[self.engine.data_rank]

    def differentiate(self, losses: list[Tensor]) -> None:
        """By torch. losses: of the ranks, for a microbatch."""
        (torch.stack(losses).mean() / self.accumulation).backward()
        self.num_done += 1

    def norm(self) -> Tensor:
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def update(self, norm: Tensor, limit: float = 0.0) -> None:
        """By torch, which clips to the limit. norm: that the engine has found."""
        expected, limit = self.norm(), limit or self.config["gradient_clipping"]
        assert_close(norm.double(), expected, rtol=1e-6, atol=1e-9)
        if limit:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_done = 0

    # -- calls at any time ----------------------------------------------------------------------------------------

    def backward(self) -> None:
        tokens, dropped, is_scaled = self.choose.choice([3, 5]), self.choose.choice([-1, 0, 1]), self.choose.random()
        batches = self.batches(tokens)
        loss = self.engine(self.own(batches), dropped)
        if is_scaled < 0.3:
            self.engine.scale(loss).backward()
        else:
            self.engine.backward(loss)
        losses = [self.model(batch, dropped) for batch in batches]
        assert_close(loss, self.own(losses))
        self.differentiate(losses)
        if self.num_done == self.accumulation:
            if self.choose.random() < 0.3:
                self.look()
            self.step()

    def step(self) -> None:
        limit = 0.0
        if self.choose.random() < 0.3 and not self.config["zero_optimization"].get("update_in_backward"):
            trained = [name for name, param in self.model.named_parameters() if param.requires_grad]
            param = self.model.get_parameter(name := self.choose.choice(trained))
            assert_close(self.engine.gradient(name), param.grad)
            if not self.config["gradient_clipping"]:
                limit = 0.3
                self.engine.clip_grad_norm_(limit)
        self.update(self.engine.step().grad_norm, limit)

    def look(self) -> None:
        """Also between the last backward of a step and the step, unless the backward has updated."""
        batch = self.own(self.batches())
        if self.num_done == self.accumulation and self.config["zero_optimization"].get("update_in_backward"):
            assert "found a forward" in refusal(self.engine, batch, kind=StateError)
            return
        with torch.no_grad():
            assert_close(self.engine(batch), self.model(batch))

    def evaluate(self) -> None:
        batches = self.batches()
        expected = torch.stack([self.model(batch) for batch in batches]).mean()
        assert_close(self.engine.eval_step(self.own(batches)).double(), expected, rtol=1e-6, atol=1e-9)

    def zero_grad(self) -> None:
        if self.num_done and self.choose.random() < 0.5:
            self.engine.optimizer.zero_grad()  # as in DeepSpeed, microbatches stay counted
        else:
            self.engine.zero_grad()
            self.num_done = 0
        self.optimizer.zero_grad()

    def show(self) -> None:
        name = self.name()
        assert_close(self.engine.full(name), self.model.get_parameter(name).data)

    def set(self) -> None:
        param = self.model.get_parameter(name := self.name())
        param.data = 0.3 * torch.randn(param.shape, generator=self.numbers, dtype=param.dtype)
        if self.choose.random() < 0.5:
            self.engine.set_full(name, param.data)
        else:
            param.data.fill_(0.1)
            self.engine.set_local(name, torch.full_like(self.engine.local(name), 0.1))

    def fail(self) -> None:
        """An error in a forward leaves the step as it is; in a backward it ends the step."""
        loss = self.engine(self.own(self.batches()))
        if self.choose.random() < 0.5:
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.engine.backward(loss)
            self.engine.zero_grad()
            self.optimizer.zero_grad()
            self.num_done = 0

    # -- calls between steps --------------------------------------------------------------------------------------

    def train_step(self) -> None:
        microbatches = [self.batches() for _ in range(self.accumulation)]
        result = self.engine.train_step(torch.cat([self.own(batches) for batches in microbatches]))
        for batches in microbatches:
            self.differentiate([self.model(batch) for batch in batches])
        self.update(result.grad_norm)

    def change(self) -> None:
        param = self.engine.module.get_parameter(name := self.name())
        with self.engine.gathered(param, modify=True), torch.no_grad():
            param.add_(0.01)
        self.model.get_parameter(name).data.add_(0.01)

    def change_rate(self) -> None:
        rate = self.choose.choice([1e-3, 3e-2])
        for group in (*self.engine.optimizer.param_groups, *self.optimizer.param_groups):
            group["lr"] = rate

    def reset(self) -> None:
        param = self.model.get_parameter(name := self.name())
        if param.requires_grad:
            self.engine.reset_states(name)
            self.optimizer.state.pop(param, None)

    def offload(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()

    def save(self) -> None:
        self.engine.save_checkpoint("saved", tag="of both")
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        if self.saved is not None:
            self.engine.load_checkpoint("saved")
            model, optimizer = copy.deepcopy(self.saved)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def load_values(self) -> None:
        self.model.load_state_dict({name: value + 0.01 for name, value in self.model.state_dict().items()})
        self.engine.load_state_dict(self.model.state_dict() if self.engine.rank == 0 else {})

    def compare(self) -> None:
        if state := self.engine.state_dict():
            assert_close(state, dict(self.model.state_dict()), rtol=1e-8, atol=1e-9)


ANY_TIME: tuple[Callable[[Both], None], ...] = (
    *(Both.backward,) * 6,
    *(Both.look, Both.evaluate, Both.zero_grad, Both.show, Both.set, Both.fail),
)
BETWEEN = (
    *(*ANY_TIME, Both.train_step, Both.train_step, Both.change, Both.change_rate, Both.reset, Both.offload),
    *(Both.save, Both.load, Both.load_values, Both.compare),
)


def call_both(folder: Path, seed: int, size: int) -> None:
    os.chdir(folder)
    both, calls = Both(seed, size), []
    try:
        for _ in range(NUM_CALLS):
            calls.append(both.choose.choice(ANY_TIME if both.num_done else BETWEEN))
            calls[-1](both)
        both.compare()
        both.engine.close()
    except BaseException as error:
        error.add_note(f"seed {seed}, {both.config}, after {[call.__name__ for call in calls]}")
        raise


@pytest.mark.parametrize("size", SIZES)
def test_any_calls_do_what_they_do_to_plain_torch(ranks: RankPool, tmp_path: Path, size: int) -> None:
    for seed in range(SIZES.index(size), NUM_PROGRAMS, len(SIZES)):
        (folder := tmp_path / f"{seed}").mkdir()
        ranks(size, call_both, folder, seed, size, timeout=120)
