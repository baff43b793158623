"""In tiles a model trains as it does without: the losses, the norm of the gradients and the values are the same.

That they do so beside recomputed blocks and pipelines is asked in tests/laws.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.model.patches import ModelPatches
from lowtide.parallel.chunked_logits import ChunkedLogits
from lowtide.parallel.tiles import Tiles
from tests.kit import models
from tests.kit.hugging_face import NUM_TOKENS, gpt2_dropout, small
from tests.kit.ranks import on_ranks
from tests.kit.training import refusal
from tests.parallel.trainings import SOCKETS, apart, values_after

VOCAB, LENGTH, WIDTH, ROWS = NUM_TOKENS, 33, 32, 2
TILES: dict[str, Any] = {"mlp": 5, "loss": 7}


class PlainMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.feed_forward = nn.Linear(LENGTH, LENGTH), PlainMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.feed_forward(x)


class Plain(nn.Module):
    """A language model that is no Hugging Face model's; gives its logits where it gets no targets."""

    def __init__(self, head: int = VOCAB) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, head)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else functional.cross_entropy(logits.view(-1, VOCAB), labels.flatten())


def gpt2(dropout: float = 0.0) -> nn.Module:
    return small("GPT2LMHeadModel", n_positions=LENGTH, **gpt2_dropout(dropout))


MODELS: dict[str, Any] = {
    "llama": partial(small, "LlamaForCausalLM"),
    "qwen3": partial(small, "Qwen3ForCausalLM", head_dim=8),
    "gpt2": gpt2,
    "Plain": Plain,
}


def batch_of(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "sgd", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def differences(
    name: str, config: dict[str, Any], tiles: Any = TILES, rel: float = 1e-6, loss_fn: Any = None
) -> list[str]:
    trained = []
    for wanted in ({"tiles": tiles}, {}):
        torch.manual_seed(0)
        engine = lowtide.initialize(MODELS[name](), config | wanted, loss_fn=loss_fn)
        trained.append(values_after(engine, batch_of(0), batch_of(2)))
    return apart(trained[0], trained[1], rel)


def loss_of_logits(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """A user's own."""
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


OFFLOADED = {"activation_checkpointing": {"offload": {"device": "cpu", "min_bytes": 1}}}
OWN_HEAD = {"zero_optimization": {"stage": 3, "units": ["*.layers.?", "lm_head"]}}


@on_ranks(2)
def test_tiles_train_as_without() -> None:
    assert differences("qwen3", config_of(1, kernels={"fuse_modules": True})) == []
    assert differences("Plain", config_of(2, prescale_gradients=True)) == []
    assert differences("llama", config_of(3, **SOCKETS, **OFFLOADED) | OWN_HEAD) == []
    assert differences("llama", config_of(3, prescale_gradients=True), loss_fn=loss_of_logits) == []
    assert differences("llama", config_of(3, bf16={"enabled": True}), rel=2e-2) == []


def tiled(model: nn.Module, tiles: Tiles) -> tuple[ModelPatches, list[str]]:
    patches, warnings = ModelPatches(), list[str]()
    tiles.apply(model, patches, warnings.append)
    return patches, warnings


class DecoratedMlp(PlainMlp):
    forward = models.decorated(PlainMlp.forward)


def test_an_mlp_with_a_decorated_forward_runs_in_tiles() -> None:
    model = nn.ModuleDict({"mlp": DecoratedMlp()})
    tiled(model, Tiles(mlp=5))
    assert "forward" in vars(model["mlp"])


def test_hooks_on_parameters_run_once_and_the_ledger_takes_tiles_off() -> None:
    model: Any = Plain()
    patches, _ = tiled(model, Tiles(mlp=5))
    runs: list[str] = []
    param = model.blocks[0].feed_forward.up.weight
    param.register_hook(lambda gradient: runs.append("gradient"))
    param.register_post_accumulate_grad_hook(lambda param: runs.append("accumulated"))
    model(**batch_of(0)).backward()
    assert runs == ["gradient", "accumulated"]
    patches.close()
    assert not any("forward" in vars(module) for module in model.modules())


def flops_of(tiles: dict[str, Any]) -> dict[str, int]:
    """Of each module, in the second step."""
    with lowtide.initialize(Plain(), config_of(0, tiles=tiles)) as engine:
        engine.train_step(batch_of(0))  # checks that each token is alone
        profile = engine.profile()
        engine.train_step(batch_of(1))
    return profile.flops_by_module


def test_a_profile_counts_in_tiles_what_is_computed_again_too() -> None:
    found, plain = flops_of(TILES), flops_of({})
    again = {f"blocks.{number}.feed_forward.{part}" for number in range(2) for part in ("up", "down")}
    assert again < plain.keys()
    assert {name: found[name] * 3 for name in again} == {name: plain[name] * 4 for name in again}
    assert found["blocks.1.mix"] == plain["blocks.1.mix"]


def test_dropout_is_the_same_when_a_tile_is_computed_again() -> None:
    """The loss is linear in the last bias of the MLP's output, so its gradient is that of the mask that was drawn."""
    torch.manual_seed(0)
    layers: Any = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Dropout(0.5))
    model = nn.ModuleDict({"mlp": layers})
    tiled(model, Tiles(mlp=5, modules=("mlp",)))
    x = torch.randn(1, LENGTH, WIDTH)
    y = layers(x)
    y.sum().backward()
    assert layers[1].bias.grad is not None
    assert torch.equal(layers[1].bias.grad, 2.0 * (y != 0).sum((0, 1)))


class CountedMlp(PlainMlp):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x) * self.count


def test_buffers_are_changed_by_the_tiles_of_the_forward_alone() -> None:
    models_of_both: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models_of_both.append(nn.ModuleDict({"mlp": CountedMlp()}))
    model, plain = models_of_both
    tiled(model, Tiles(mlp=5, modules=("mlp",)))
    x = torch.randn(1, LENGTH, WIDTH)
    y, expected = model["mlp"](x), torch.cat([plain["mlp"](tile) for tile in torch.split(x, 5, dim=1)], dim=1)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert model["mlp"].count == plain["mlp"].count == 7
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad)


def test_what_reads_logits_gets_them_and_is_named() -> None:
    model = Plain()
    ids = batch_of(0)["input_ids"]
    expected = model(ids)
    _, warnings = tiled(model, Tiles(loss=7))
    logits = model(ids)
    assert isinstance(logits, ChunkedLogits) and logits.shape == expected.shape
    assert torch.equal(logits.argmax(-1), expected.argmax(-1)) and torch.equal(
        logits[:, 3:, :].exp(), expected[:, 3:].exp()
    )
    assert [text.split(" reads")[0] for text in warnings] == ["tiles.loss: argmax", "tiles.loss: exp"]


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy * ctx.saved_tensors[0]


def test_an_autograd_function_of_logits_gets_values_and_gives_gradients() -> None:
    model, ids = Plain(), batch_of(0)["input_ids"]
    gradients = []
    for tiles in (Tiles(), Tiles(loss=7)):
        tiled(model, tiles)
        model.zero_grad()
        Squares.apply(model(ids).view(-1, VOCAB)).backward()
        gradients.append([param.grad for param in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


class MixesTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x.mean(1, keepdim=True)


def test_what_tiles_cannot_do_is_refused_when_it_runs() -> None:
    logits, mixing = Plain(), nn.ModuleDict({"part": MixesTokens()})
    tiled(logits, Tiles(loss=7))
    text = refusal(logits(batch_of(0)["input_ids"]).div_, 2, kind=RuntimeError)
    assert "tiles.loss: div_ changes the logits of 'head' in place" in text
    tiled(mixing, Tiles(mlp=5, modules=("part",)))
    text = refusal(mixing["part"], torch.randn(1, LENGTH, WIDTH))
    assert "expected that 'part' (MixesTokens) acts on each token alone" in text


NORM = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3)))
INNER = {"zero_optimization": {"stage": 3, "units": ["*.up"]}}
REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "no mlp": (nn.Linear(3, 3), {"mlp": "auto"}, "tiles.mlp: expected a module with the name of an MLP"),
    "no head": (Plain(VOCAB + 1), {"loss": 5}, "tiles.loss: expected a single Linear .* found none in Plain"),
    "pattern": (Plain(), {"mlp": 5, "modules": ["*.ffn"]}, r'tiles.modules: "\*.ffn" matches no module of Plain'),
    "nested": (Plain(), {"mlp": 5, "modules": ["*.feed_forward", "*.up"]}, "'blocks.0.feed_forward.up' lies in"),
    "head": (
        Plain(),
        {"loss": 5, "head": "out"},
        "tiles.head: expected the name of a Linear, found no module at 'out'",
    ),
    "not a head": (Plain(), {"loss": 5, "head": "blocks"}, "tiles.head: .* found ModuleList at 'blocks'"),
    "norm": (NORM, {"mlp": 5, "modules": ["0"]}, "tiles.modules: '0' holds a BatchNorm1d, and that mixes tokens"),
    "inner unit": (Plain(), TILES, "unit 'blocks.0.feed_forward.up' lies in 'blocks.0.feed_forward'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_or_a_unit_inside_is_an_error(case: str) -> None:
    model, tiles, text = REFUSED[case]
    config = config_of(0, tiles=tiles) | (INNER if case == "inner unit" else {})
    assert re.search(text, refusal(lowtide.initialize, model, config, kind=lowtide.ConfigError))


def test_what_the_file_may_say() -> None:
    sizes = {say: lowtide.Config.load({"tiles": say}).tiles for say in ("auto", 512)}
    assert [(one.mlp, one.loss) for one in sizes.values()] == [("auto", "auto"), (512, 512)]
    for wrong in ("all", True, {"mlp": -1}, {"loss": "big"}, {"size": 3}):
        assert "tiles" in refusal(lowtide.Config.load, {"tiles": wrong}, kind=lowtide.ConfigError)
    notes = lowtide.Config.load({"tiles": {"mlp": 5, "head": "out"}}).notes
    assert 'tiles.head: "out" has no effect here: tiles.loss is 0' in notes
