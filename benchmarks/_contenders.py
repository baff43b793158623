"""Who is compared, a table of data, and how each trains: a builder a kind, from a model to a `Trainer`.

A builder takes a model, or a callable that builds one; then it keeps as much of it away from each process as its users
would, for a model that is too large to be built in one: lowtide and DeepSpeed's ZeRO-3 shard it while it is built,
FSDP2 builds it on the meta device and initializes the shards, and DDP, of which every process has all, builds it.

Every peer is set up as its own documentation advises for speed. The optimizer is AdamW for all; the peers get torch's
fused implementation, the fastest that torch has on the CPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _harness import Contender, by_name
from _model import initialize_in_place
from torch import Tensor, nn
from torch.optim import AdamW

OFFLOAD_FOLDER = "LOWTIDE_OFFLOAD_FOLDER"
"""The environment variable that says where files of offloaded state go."""

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}

REFERENCE, DDP, FSDP2 = "single", "ddp", "fsdp2"
FOLDER, RANKS = "FOLDER", "RANKS"  # in a config: the folder of offloaded state, and how many ranks there are


def lowtide(
    name: str, label: str, stage: int, zero: Mapping[str, Any] | None = None, *, named: bool = False, **more: Any
) -> Contender:
    """lowtide with more of its section `zero_optimization`, and more of its config. named: it runs when it is named."""
    options = {"zero": {"stage": stage, **(zero or {})}, "more": more}
    return Contender(name, f"lowtide stage {stage}{label}", "lowtide", options, named)


_FILE = {"device": "nvme", "nvme_path": FOLDER}


def _offload(name: str, label: str, *, states: Any = None, parameters: bool = False, **zero: Any) -> Contender:
    sections: dict[str, Any] = {"offload_param": _FILE} if parameters else {}
    if states is not None:
        sections["offload_optimizer"] = _FILE | states
    return lowtide(f"lowtide-3-{name}", f", {label}", 3, sections | zero, named=True)


_LEAST = {"update_in_backward": True, "stage3_prefetch_bucket_size": 0}
_RECOMPUTED = {"activation_checkpointing": {"every": 1}}
CONTENDERS = by_name(
    Contender(REFERENCE, "one process, whole batch", "single"),
    Contender("alone", "forwards and backwards alone, nothing sent or updated", "alone", only_when_named=True),
    Contender(DDP, "DDP", "ddp"),
    Contender("ddp-each", "DDP, sums of each microbatch", "ddp", {"sums_each": True}),
    Contender("ddp-zero", "DDP + ZeroRedundancyOptimizer", "ddp", {"sharded_optimizer": True}),
    Contender(FSDP2, "FSDP2", "fsdp2"),
    Contender("fsdp2-keep", "FSDP2, no reshard after forward", "fsdp2", {"reshard_after_forward": False}),
    *(Contender(f"deepspeed-{stage}", f"DeepSpeed ZeRO-{stage}", "deepspeed", {"stage": stage}) for stage in (1, 2, 3)),
    *(lowtide(f"lowtide-{stage}", "", stage) for stage in (0, 1, 2, 3)),
    lowtide("lowtide-3-in-backward", ", update in backward", 3, {"update_in_backward": True}),
    *(
        lowtide(f"lowtide-{stage}-sockets", ", sockets", stage, communication={"transport": "sockets"})
        for stage in (0, 1, 2, 3)
    ),
    _offload("states-cpu", "states on the CPU", states={"device": "cpu"}),
    _offload("states-nvme", "states in a file", states={}),
    _offload("half-nvme", "half of the states in a file", states={"ratio": 0.5}),
    _offload("nvme", "states and parameters in files", states={}, parameters=True),
    _offload("nvme-overlap", "both in files, speculative", states={"overlap": "speculative"}, parameters=True),
    _offload("least", "both in files, least memory", states={}, parameters=True, **_LEAST),
    lowtide("lowtide-3-recompute", ", blocks recomputed", 3, named=True, **_RECOMPUTED),
    lowtide("lowtide-3-tiles", ", tiles", 3, named=True, tiles="auto"),
    lowtide("lowtide-3-long", ", tiles, blocks recomputed", 3, named=True, tiles="auto", **_RECOMPUTED),
    *(
        Contender(
            f"deepspeed-3-{place}",
            f"DeepSpeed ZeRO-3, offload to {place}",
            "deepspeed",
            {"stage": 3, "offload": place},
            only_when_named=True,
        )
        for place in ("cpu", "nvme")
    ),
)


Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Setup:
    """What is asked of every contender alike, besides the model."""

    microbatch: int = 1  # sequences of a rank in a forward
    accumulation: int = 1  # forwards and backwards of a step
    clip: float = 0.0  # the largest norm of all gradients together; 0: any
    device: str = "cpu"  # or the type of an accelerator: the current one
    dtype: str = "fp32"  # or "bf16": in which a model computes; its weights and the optimizer stay in fp32
    recompute_blocks: bool = False  # blocks keep their input alone, and run again in the backward
    compiles: str = ""  # or "blocks", each of them, or "all", the model: what torch compiles of a peer
    backend: str = "inductor"  # of the compiler
    blocks: str = "blocks"  # the name of their list
    inputs: tuple[str, ...] = ()  # names under which a model takes tokens and targets; (): in that order

    def microbatches(self, tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Gives a rank's batch in parts; tokens, targets: (accumulation x microbatch, sequence)."""
        parts = (torch.split(one, self.microbatch) for one in (tokens, targets))
        return list(zip(*parts, strict=True))

    def given(self, tokens: Tensor, targets: Tensor) -> Any:
        """Gives what a model is called with, as the batch that a loader would give."""
        return dict(zip(self.inputs, (tokens, targets), strict=True)) if self.inputs else (tokens, targets)

    def loss_of(self, model: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
        given = self.given(tokens, targets)
        found = model(**given) if self.inputs else model(*given)
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        return loss

    def computing(self) -> AbstractContextManager[Any]:
        """In which a forward of plain torch runs."""
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "bf16" else nullcontext()

    def join(self) -> str:
        """Makes the process group, unless there is one already, and gives its backend."""
        if not dist.is_initialized():
            dist.init_process_group(dist.get_default_backend_for_device(self.device))
        return str(dist.get_backend())


@dataclass(frozen=True)
class Trainer:
    """`step` trains one step on a batch and gives the loss, None on a rank that does not know it.

    close: returns when every rank is done. engine: of lowtide or DeepSpeed. model, optimizer: of torch.
    """

    step: Callable[..., Any]
    close: Callable[[], None]
    engine: Any = None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


def _plain(
    model: nn.Module,
    setup: Setup,
    optimizer: torch.optim.Optimizer | None,
    unsummed: Callable[[], AbstractContextManager[Any]] = nullcontext,
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Trainer:
    """Train with plain torch; without an optimizer nothing is updated.

    unsummed: within it a backward keeps its gradients on its rank, as all but the last of a step may. computing: in it
    a forward runs.
    """

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        microbatches = setup.microbatches(tokens, targets)  # those of all ranks, where one process has the whole batch
        for number, microbatch in enumerate(microbatches, 1):
            with nullcontext() if number == len(microbatches) else unsummed():
                with computing():
                    loss = setup.loss_of(model, *microbatch) / len(microbatches)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if optimizer is not None:
            if setup.clip:
                nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
            optimizer.step()
        model.zero_grad()
        return torch.stack(losses).sum()

    return Trainer(step, wait_for_all, model=model, optimizer=optimizer)


def wait_for_all() -> None:
    """Return when every rank is here; one process alone has no group."""
    if dist.is_initialized():
        dist.barrier()


def _built(model: Model, setup: Setup, device: str) -> nn.Module:
    """Gives the model on a device, with blocks that are recomputed and compiled as is asked, as torchtitan does it."""
    if isinstance(model, nn.Module):
        model = model.to(device)
    else:
        with torch.device(device):
            model = model()
    if setup.recompute_blocks:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        blocks = model.get_submodule(setup.blocks)
        for name, block in list(blocks.named_children()):
            setattr(blocks, name, checkpoint_wrapper(block, preserve_rng_state=False))  # a block draws no numbers
    compiled = {"": [], "blocks": model.get_submodule(setup.blocks).children(), "all": [model]}
    for part in compiled[setup.compiles]:
        part.compile(backend=setup.backend)
    return model


def build_single(model: Model, setup: Setup) -> Trainer:
    """Give plain torch in one process."""
    module = _built(model, setup, setup.device)
    return _plain(module, setup, AdamW(module.parameters(), fused=True, **ADAMW), computing=setup.computing)


def build_alone(model: Model, setup: Setup) -> Trainer:
    """Give forwards and backwards with plain torch on each rank, and nothing else: the least that a step can take."""
    setup.join()
    return _plain(_built(model, setup, setup.device), setup, None, computing=setup.computing)


def build_ddp(
    model: Model, setup: Setup, *, sharded_optimizer: bool = False, sums_each: bool = False, hook: str | None = None
) -> Trainer:
    """Gives DistributedDataParallel with bucket views; `sharded_optimizer` shards the optimizer state (ZeRO-1).

    sums_each: a loop that does not know `no_sync`, with which gradients are summed over ranks once a step. hook:
    "fp16" or "powersgd", torch's own for shorter messages.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    setup.join()
    # One bucket: the hook starts sums of several in the order in which earlier ones end, which differs between ranks.
    cap = 1000 if hook == "powersgd" else 25
    module = _built(model, setup, setup.device)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer: torch.optim.Optimizer
    if sharded_optimizer:
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, fused=True, **ADAMW)
    else:
        optimizer = AdamW(wrapped.parameters(), fused=True, **ADAMW)
    unsummed = nullcontext if sums_each else wrapped.no_sync
    return _plain(wrapped, setup, optimizer, unsummed, setup.computing)


def build_fsdp2(
    model: Model, setup: Setup, *, reshard_after_forward: bool = True, reduce_dtype: str = "float32"
) -> Trainer:
    """Gives FSDP2: `fully_shard` on every block, then on the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    setup.join()
    narrow = torch.bfloat16 if setup.dtype == "bf16" else None
    precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=getattr(torch, reduce_dtype))
    mesh = init_device_mesh(setup.device, (dist.get_world_size(),))
    is_empty = not isinstance(model, nn.Module)
    module = _built(model, setup, "meta" if is_empty else setup.device)
    for block in module.get_submodule(setup.blocks).children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    if is_empty:
        module.to_empty(device=setup.device)
        initialize_in_place(module)
    return _plain(module, setup, AdamW(module.parameters(), fused=True, **ADAMW))


def deepspeed_config(microbatch: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Return a config that says nothing while it trains; `more` is added."""
    config = {"train_micro_batch_size_per_gpu": microbatch, "gradient_accumulation_steps": accumulation}
    return config | {"steps_per_print": 10**9, "gradient_clipping": 0.0, **more}  # left out, clipping means 1.0


def build_deepspeed(model: Model, setup: Setup, *, stage: int, offload: str = "none") -> Trainer:
    """Gives DeepSpeed ZeRO, with torch's AdamW as the client optimizer.

    offload: "cpu" or "nvme", for states and parameters; then with DeepSpeed's own CPU Adam, which it asks for.
    """
    if setup.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # asked for in the import
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    deepspeed.init_distributed(dist_backend=setup.join(), verbose=False)
    config = deepspeed_config(
        setup.microbatch,
        setup.accumulation,
        zero_optimization={"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        gradient_clipping=setup.clip,
        bf16={"enabled": setup.dtype == "bf16"},
    )
    if offload != "none":
        place = {"device": offload, "nvme_path": os.environ[OFFLOAD_FOLDER]}
        config["zero_optimization"] = {"stage": stage, "offload_optimizer": place, "offload_param": place}
        config["optimizer"] = {"type": "AdamW", "params": ADAMW}
    is_sharded_at_once = stage == 3 and not isinstance(model, nn.Module)
    with deepspeed.zero.Init(config_dict_or_path=config) if is_sharded_at_once else nullcontext():
        module = _built(model, setup, setup.device)
    optimizer = AdamW(module.parameters(), fused=True, **ADAMW) if offload == "none" else None
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for microbatch in setup.microbatches(tokens, targets):
            loss = setup.loss_of(engine, *microbatch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Trainer(step, wait_for_all, engine=engine)


def build_lowtide(model: Model, setup: Setup, *, zero: dict[str, Any], more: dict[str, Any]) -> Trainer:
    """Gives lowtide as a user's script has it: the model and one config. zero: its section; more: other sections."""
    import lowtide

    config = lowtide_config(
        train_micro_batch_size_per_gpu=setup.microbatch,
        gradient_accumulation_steps=setup.accumulation,
        zero_optimization=zero,
        gradient_clipping=setup.clip,
        activation_checkpointing={"every": 1 if setup.recompute_blocks else 0},
        bf16={"enabled": setup.dtype == "bf16"},
        device="cpu" if setup.device == "cpu" else "auto",
    )
    if "compile" in more:
        more = more | {"compile": more["compile"] | {"backend": setup.backend}}
    words = {FOLDER: os.environ.get(OFFLOAD_FOLDER), RANKS: int(os.environ.get("WORLD_SIZE", "1"))}
    engine = lowtide.initialize(model, filled(config | more, words))

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_step(setup.given(tokens, targets)).loss
        return loss

    return Trainer(step, engine.close, engine=engine)


def lowtide_config(stage: int = 0, **more: Any) -> dict[str, Any]:
    """Return a config on the CPU with AdamW; `more` replaces its keys."""
    config: dict[str, Any] = {"device": "cpu", "steps_per_print": 0, "zero_optimization": {"stage": stage}}
    return config | {"optimizer": {"type": "adamw", "params": ADAMW}} | more


def filled(value: Any, words: Mapping[str, Any]) -> Any:
    """Return a config in which words such as FOLDER are replaced."""
    if isinstance(value, Mapping):
        return {key: filled(one, words) for key, one in value.items()}
    return words.get(value, value) if isinstance(value, str) else value


_LIBRARIES = {
    "ddp": ["torch.nn.parallel", "torch.distributed.optim"],
    "fsdp2": ["torch.distributed.device_mesh", "torch.distributed.fsdp"],
    "deepspeed": ["deepspeed"],
    "lowtide": ["lowtide.engine.build"],
}


def import_libraries(kind: str) -> None:
    """Imports what the builder of a kind imports on a CPU, so that its memory can be told from that of the training."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in ["torch._dynamo", *_LIBRARIES.get(kind, [])]:  # the first optimizer imports the compiler, some 70 MiB
        importlib.import_module(name)


BUILDERS: dict[str, Callable[..., Trainer]] = {
    "single": build_single,
    "alone": build_alone,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "deepspeed": build_deepspeed,
    "lowtide": build_lowtide,
}
