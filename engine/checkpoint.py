"""Saves and restores everything that a training is, at any number of ranks and any ZeRO stage."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from ..checkpoint.checkpoint import MODEL, STATE, Checkpoint
from ..checkpoint.dcp import STEP, OptimizerNames, option_blobs
from ..checkpoint.errors import CheckpointError, NoCheckpointError
from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.fragment import Fragment, TensorInfo
from ..checkpoint.index import Manifest
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.values import decode, encode
from ..checkpoint.writer import RankWriter, Snapshot
from ..comm import Mesh
from ..zero.optimizer import ShardedOptimizer, StateKey
from .agreement import all_or_none, raise_together
from .config import Config
from .log import logger
from .named_state import NamedState
from .run_state import encode_client_state, random_state, set_random_state
from .save_job import SaveJob
from .weights import model_files

_INTACT = "What was saved before is as it was, and training can go on."
_WITHOUT_STEP = ("sgd", "lion")  # torch's own keep no step either


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says beside tensors. training: as it was given to `save`."""

    tag: str
    training: Any
    config: Mapping[str, Any]
    client_state: dict[str, Any]


class Checkpointer:
    """Saves and loads. Every method is a collective: all ranks must call it alike.

    Each rank writes its own part of each tensor (replicas divide theirs) straight from its shards, and reads only the
    parts that it needs, whoever wrote them; nothing is gathered, see `checkpoint/`.
    """

    def __init__(
        self, config: Config, mesh: Mesh, module: nn.Module, optimizer: ShardedOptimizer, named: NamedState
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._world = mesh.world
        self._module = module
        self._optimizer = optimizer
        self._named = named
        self._job: SaveJob | None = None
        self._job_folder: tuple[CheckpointFolder, str] | None = None

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any],
        step: int,
        training: Mapping[str, Any],
    ) -> str:
        """Writes a checkpoint, in the background where the config says so; returns its tag.

        Waits for an earlier one first. Raises CheckpointError on every rank where any fails; with `async` that is at a
        later call of this or of `finish`.
        """
        self.finish()
        target = CheckpointFolder(os.fspath(folder))
        has_own_tag = tag is not None
        tag = str(self._world.broadcast_object(tag if tag is not None else f"global_step{step}"))
        what = f"saving checkpoint '{tag}' to {target.path}"
        with all_or_none(self._world, what, _INTACT):
            own_state = {
                "random": random_state(),
                "client_state": encode_client_state(client_state),
                "scalars": encode(self._optimizer.scalar_states(), "optimizer state"),
            }
            encoded = encode(dict(training), "training")
        states = self._state_dtypes()
        names = self._optimizer_names(bool(states))
        manifest = self._manifest(tag, has_own_tag, step, encoded, states)
        with all_or_none(self._world, what, _INTACT):
            saving = target.begin(tag) if self._world.rank == 0 else target.saving_folder(tag)

        def commit() -> None:
            target.commit(manifest, names, self._config.checkpoint.keep_last)
            logger.info("checkpoint '%s' is complete in %s", tag, target.path)

        is_first = self._world.rank == 0
        try:
            with all_or_none(self._world, what, _INTACT):
                if not saving.is_dir():
                    raise CheckpointError(
                        f"{saving} is not there; all ranks must see one folder, for example a network disk"
                    )
                writer = RankWriter(saving, self._world.rank)
                groups = self._optimizer.param_groups
                options = option_blobs(self._optimizer.kind, groups, names) if is_first else []
                fragments = self._fragments()
                snapshot = Snapshot(fragments) if self._config.checkpoint.asynchronous else None
            if snapshot is None:
                with all_or_none(self._world, what, _INTACT):
                    writer.write(fragments, options, own_state)
                with all_or_none(self._world, what, _INTACT):
                    if is_first:
                        commit()
        except CheckpointError:
            self._discard(target, tag)
            raise
        if snapshot is not None:

            def write() -> None:
                writer.write(snapshot.fragments, options, own_state)
                snapshot.drop()

            self._job = SaveJob(saving, self._world.size, write, commit if is_first else None)
            self._job_folder = (target, tag)
        return tag

    @property
    def has_failed(self) -> bool:
        """True where a save in the background has failed on this rank."""
        return self._job is not None and self._job.has_failed

    def finish(self) -> None:
        """Waits until the save that is under way is complete. Raises CheckpointError on every rank if it failed."""
        if self._job is None or self._job_folder is None:
            return
        job, (folder, tag) = self._job, self._job_folder
        what = f"saving checkpoint '{tag}' to {folder.path}"
        job.wait_written()
        try:
            raise_together(self._world, job.write_error, what, _INTACT)
            job.wait_committed()
            raise_together(self._world, job.commit_error, what, _INTACT)
        except CheckpointError:
            job.cancel()
            self._discard(folder, tag)
            self._job, self._job_folder = None, None
            raise
        self._job, self._job_folder = None, None

    def _discard(self, folder: CheckpointFolder, tag: str) -> None:
        if self._world.rank == 0:
            folder.discard(tag)

    def abandon(self) -> None:
        """Waits for the save that is under way, as far as this rank can without the others: after an error."""
        if self._job is not None:
            self._job.wait_written()

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, folder: str | os.PathLike[str], tag: str | None) -> Restored:
        """Brings parameters, optimizer states and random states back, and returns the rest.

        Raises NoCheckpointError where there is none, CheckpointError where one is damaged or of another model.
        """
        self.finish()
        target = CheckpointFolder(os.fspath(folder))
        tag, other = self._find(target, tag)
        hint = f"The newest other checkpoint is '{other}': load_checkpoint(folder, tag=\"{other}\"). " if other else ""
        with all_or_none(self._world, f"loading checkpoint '{tag}' from {target.path}", hint + "Nothing was changed."):
            checkpoint = target.open(tag)
            weights, states = checkpoint.weights, checkpoint.states
            own = checkpoint.own_state(self._rank_of_origin(checkpoint))
            self._check_fits(checkpoint)
        changed = "Parameters were read in part: load another checkpoint before you train on."
        with all_or_none(self._world, f"loading checkpoint '{tag}' from {target.path}", hint + changed):
            training = decode(checkpoint.manifest.training)
            scalars = self._scalars_of(checkpoint)
            self._optimizer.make_states(training["num_steps"], _states_in(checkpoint), scalars)
            shared = self._named.has_replicas  # they read the same values, perhaps on this host
            weights.read(self._named.weights(changes=True), shared)
            self._read_buffers(weights)
            states.read(self._named.states(changes=True), shared)
        self._named.publish()
        self._restore_random(checkpoint, own["random"])
        logger.info("checkpoint '%s' (step %d) loaded from %s", tag, checkpoint.manifest.step, target.path)
        return Restored(tag, training, checkpoint.manifest.config, decode(own["client_state"]))

    # -- what is saved --------------------------------------------------------------------------------------------

    def _fragments(self) -> list[Fragment]:
        """This rank's part of everything, by full name."""
        weights = self._named.weights(saves=True)
        states = self._named.states(saves=True)
        found = [_prefixed(MODEL, fragment) for fragment in weights] + [_prefixed(STATE, state) for state in states]
        if self._named.holds_buffers:
            for name, buffer in self._named.buffers().items():
                found.append(Fragment(MODEL + name, tuple(buffer.shape), 0, buffer.detach().reshape(-1)))
        if self._world.rank == 0:
            step = torch.tensor([float(self._optimizer.num_steps)])
            found.append(Fragment(STEP, (), 0, step))
        return found

    def _optimizer_names(self, has_states: bool) -> OptimizerNames:
        names = {id(param): name for name, param in self._named.trained.items()}
        groups = (tuple(names[id(param)] for param in group["params"]) for group in self._optimizer.param_groups)
        has_step = has_states and self._optimizer.kind not in _WITHOUT_STEP
        return OptimizerNames(tuple(names.values()) if has_step else (), tuple(groups))

    def _state_dtypes(self) -> dict[str, dict[str, torch.dtype]]:
        """The states of each parameter that has any. A collective: a rank knows only those that it holds a part of."""
        found: dict[StateKey, dict[str, torch.dtype]] = {}
        for one in self._world.gather_objects(self._optimizer.state_dtypes()):
            found.update(one)
        return {name: found[key] for name, key in self._named.catalog.state_keys.items() if key in found}

    def _manifest(
        self, tag: str, has_own_tag: bool, step: int, training: Any, states: Mapping[str, Mapping[str, torch.dtype]]
    ) -> Manifest:
        catalog = self._named.catalog
        tensors = {MODEL + name: info for name, info in (*catalog.parameters.items(), *catalog.buffers.items())}
        for name, dtypes in states.items():
            for state, dtype in dtypes.items():
                tensors[f"{STATE}{name}.{state}"] = TensorInfo(catalog.parameters[name].shape, dtype)
        tensors[STEP] = TensorInfo((), torch.float32)
        return Manifest(
            tag=tag,
            step=step,
            saved_at=0.0,
            has_own_tag=has_own_tag,
            versions={"lowtide": version("lowtide"), "torch": torch.__version__, "python": platform.python_version()},
            topology={
                "world_size": self._world.size,
                "stage": self._config.zero_optimization.stage,
                "shard_size": self._mesh.data_size // self._mesh.axes["replica"].size,
                "replicas": self._mesh.axes["replica"].size,
                "pipeline": self._world.size // self._mesh.data_size,
            },
            tensors=tensors,
            compute_dtypes=dict(catalog.compute_dtypes),
            aliases=dict(catalog.aliases),
            training=training,
            config=self._config.as_dict(),
            model_files=model_files(self._module, _first_dtype(self._named)),
        )

    # -- what is loaded -------------------------------------------------------------------------------------------

    def _find(self, folder: CheckpointFolder, tag: str | None) -> tuple[str, str | None]:
        """The tag to load and the newest other one, as rank 0 sees the folder."""
        found: tuple[str, str | None] | None = None
        absent = ""
        with all_or_none(self._world, f"looking for a checkpoint in {folder.path}"):
            if self._world.rank == 0:
                try:
                    chosen = folder.find(tag)
                    found = (chosen, folder.alternative_to(chosen))
                except NoCheckpointError as error:
                    absent = str(error)
        found, absent = self._world.broadcast_object((found, absent))
        if found is None:
            raise NoCheckpointError(absent)
        chosen, other = found
        return chosen, other

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError, with every difference, where the checkpoint is of another model or optimizer."""
        found = checkpoint.weights.tensors
        catalog = self._named.catalog
        expected = {name: info.shape for name, info in (*catalog.parameters.items(), *catalog.buffers.items())}
        faults = [f"'{name}' is not in it" for name in expected if name not in found]
        faults += [f"'{name}' is not in the model" for name in found if name not in expected]
        faults += [
            f"'{name}' has shape {found[name].shape} in it, {shape} in the model"
            for name, shape in expected.items()
            if name in found and found[name].shape != shape
        ]
        training = decode(checkpoint.manifest.training)
        groups = len(self._optimizer.param_groups)
        saved = len(training["learning_rates"]["options"])
        if saved != groups:
            faults.append(f"it has {saved} parameter groups, the optimizer {groups}")
        by_name = _states_in(checkpoint)
        states = {state for one in by_name.values() for state in one}
        if training["num_steps"] and not self._optimizer.can_take(training["optimizer"], states):
            faults.append(
                f"it has the states of optimizer {training['optimizer']} ({', '.join(sorted(states)) or 'none'}), this "
                f"run has optimizer {self._optimizer.kind}; engine.load_weights(folder) takes the parameters alone"
            )
        elif training["num_steps"]:
            faults += self._parameters_without_states(by_name)
        if faults:
            raise CheckpointError(f"{checkpoint.path} does not fit: " + "; ".join(faults))

    def _parameters_without_states(self, found: Mapping[str, Mapping[str, torch.dtype]]) -> list[str]:
        """Those that others of the same parameter group have: they were frozen, or in another group."""
        faults = []
        for group in self._optimizer_names(False).groups:
            expected = {state for name in group for state in found.get(name, {})}
            faults += [
                f"'{name}' has no optimizer state in it ({', '.join(sorted(missing))}): it was not trained then"
                for name in group
                if (missing := expected - set(found.get(name, {})))
                and math.prod(self._named.catalog.parameters[name].shape)
            ]
        return faults

    def _scalars_of(self, checkpoint: Checkpoint) -> dict[int, dict[str, Any]]:
        """Of all ranks that wrote: one may have had no element of a parameter group."""
        merged: dict[int, dict[str, Any]] = {}
        for rank in range(checkpoint.manifest.num_files):
            merged.update(decode(checkpoint.own_state(rank)["scalars"]))
        return merged

    def _read_buffers(self, source: CheckpointReader) -> None:
        for name, buffer in self._named.buffers().items():
            flat = buffer.detach().contiguous().view(-1)  # the buffer's own memory, unless it has strides
            source.read([Fragment(name, tuple(buffer.shape), 0, flat)])
            if flat.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(flat.view(buffer.shape))

    def _rank_of_origin(self, checkpoint: Checkpoint) -> int:
        """The rank whose own state this one takes over."""
        return self._world.rank if checkpoint.manifest.num_files == self._world.size else 0

    def _restore_random(self, checkpoint: Checkpoint, encoded: Any) -> None:
        if checkpoint.manifest.num_files == self._world.size:
            set_random_state(encoded)
        else:
            logger.info(
                "random generators go on as they are: the checkpoint has the states of %d ranks, there are %d",
                checkpoint.manifest.num_files,
                self._world.size,
            )


def _states_in(checkpoint: Checkpoint) -> dict[str, dict[str, torch.dtype]]:
    """Parameter -> the dtypes of its states."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for full_name, info in checkpoint.states.tensors.items():
        name, _, state = full_name.rpartition(".")
        found.setdefault(name, {})[state] = info.dtype
    return found


def _prefixed(prefix: str, fragment: Fragment) -> Fragment:
    return replace(fragment, name=prefix + fragment.name)


def _first_dtype(named: NamedState) -> torch.dtype | None:
    """The dtype in which the first floating-point parameter is computed; configurations of Hugging Face name it."""
    return next((dtype for dtype in named.catalog.compute_dtypes.values() if dtype.is_floating_point), None)
