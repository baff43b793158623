"""Save and load the whole state of a training, at any number of ranks and any ZeRO stage."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.checkpoint import AVERAGE, MODEL, STATE, Checkpoint
from ...checkpoint.chunk_view import ChunkView, TensorInfo
from ...checkpoint.dcp import STEP, OptimizerNames, option_blobs
from ...checkpoint.files import CheckpointError, NoCheckpointError
from ...checkpoint.folder import CheckpointFolder, WritingProcess
from ...checkpoint.index import LeftOut, Manifest
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.values import encode
from ...checkpoint.writer import Snapshot, write_part
from ...offload import HostPool, host_is_pinned
from ...optimizers import OPTIMIZERS
from ...watch.log import logger
from ...zero.parameter_states import StateKey
from ...zero.sign_update import is_rank_state
from ..config.config import Config
from .agreement import all_or_none, display_path, raise_together
from .fit import check_fits, is_new_remainder, states_in
from .frozen import Frozen
from .named_state import NamedState
from .run_state import (
    encode_client_state,
    encode_extra_states,
    load_extra_states,
    load_states,
    random_state,
    read_client_state,
    read_random_state,
    read_scalars,
    read_training,
    set_random_state,
)
from .save_job import SaveJob
from .weights import first_floating, model_files

_INTACT = "What was saved before is as it was, and training can go on."


class Checkpointer:
    """Saves and loads checkpoints. Each method is a collective: all ranks must call it alike.

    Each rank writes its part of each tensor (replicas share the work) straight from its shards. It reads only the
    ranges that it needs, whichever rank wrote them. Nothing is gathered. See `checkpoint/`.
    """

    def __init__(self, config: Config, named: NamedState, frozen: Frozen) -> None:
        self._config, self._named, self._frozen = config, named, frozen
        self._mesh, self._world, self._optimizer = named.mesh, named.mesh.world, named.optimizer
        self._pool = HostPool(pinned=True) if host_is_pinned(self._world.device) else None
        self._under_way: tuple[SaveJob, CheckpointFolder, str] | None = None  # the last is the tag

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any],
        step: int,
        training: Mapping[str, Any],
        is_latest: bool = True,
    ) -> str:
        """Write a checkpoint, in the background if the config says so, and return its tag.

        Waits for an earlier save first. Raises CheckpointError on every rank if any fails; with `async` a later call
        of this method or of `wait` raises it.
        """
        self.wait()  # an earlier save may have the same tag, and `_under_way` holds a single job
        has_own_tag = tag is not None
        # A tag that a script makes of the time differs between ranks.
        tag = str(self._world.broadcast_object(tag if tag is not None else f"global_step{step}"))
        what = f"saving checkpoint '{tag}' to {display_path(folder)}"
        with all_or_none(self._world, what, _INTACT):
            target = CheckpointFolder(folder)
            own_state = self._own_state(client_state)
            # Parameter names by group: a later run may have the groups in another order.
            rates = {**training["learning_rates"], "members": list(map(list, self._named.option_groups))}
            encoded = encode({**training, "learning_rates": rates}, "training")
        states = self._state_dtypes()
        left_out = self._frozen.to_leave_out() if self._config.checkpoint.exclude_frozen_parameters else {}
        names = self._optimizer_names(bool(states))
        # Each block ends when all ranks have come to its end: the folder exists before any rank writes into it, and all
        # parts are on the disk before rank 0 commits. An error of a rank is an error of all, so all come to `except`.
        saving, commit = target.saving_folder(tag), None
        with all_or_none(self._world, what, _INTACT):
            if self._world.rank == 0:
                manifest = self._manifest(tag, has_own_tag, step, encoded, states, left_out)
                commit = partial(self._commit, target, manifest, names, is_latest)
                target.begin(tag)
        snapshot: Snapshot | None = None
        try:
            with all_or_none(self._world, what, _INTACT):
                snapshot, write = self._writing(saving, names, own_state, left_out)
            if snapshot is None:
                with all_or_none(self._world, what, _INTACT):
                    write()
                with all_or_none(self._world, what, _INTACT):
                    if commit is not None:
                        commit()
        except CheckpointError:
            if snapshot is not None:  # another rank has failed
                snapshot.drop()
            self._discard(target, tag)
            raise
        if snapshot is not None:
            # Rank 0's thread waits for the parts of these processes, unless they are known to be dead.
            processes = self._world.gather_objects(WritingProcess.this())
            self._under_way = SaveJob(saving, processes, write, commit), target, tag
        return tag

    def _writing(
        self, saving: Path, names: OptimizerNames, own_state: Mapping[str, Any], left_out: Collection[str]
    ) -> tuple[Snapshot | None, Callable[[], None]]:
        """Return the function that writes this rank's part, and with `async` a snapshot of the values."""
        if not saving.is_dir():
            raise CheckpointError(f"{saving} does not exist; all ranks must see the same folder: use a network disk")
        groups = self._optimizer.param_groups
        options = option_blobs(self._optimizer.kind, groups, names) if self._world.rank == 0 else []
        chunk_views = self._chunk_views(left_out)
        write = partial(write_part, saving, self._world.rank, blobs=options, own_state=own_state)
        if not self._config.checkpoint.asynchronous:
            return None, partial(write, chunk_views)
        snapshot = Snapshot(chunk_views, self._pool, self._world.device)

        def write_snapshot() -> None:
            try:
                snapshot.wait()
                write(snapshot.chunk_views)
            finally:
                snapshot.drop()

        return snapshot, write_snapshot

    def _commit(self, target: CheckpointFolder, manifest: Manifest, names: OptimizerNames, is_latest: bool) -> None:
        target.commit(manifest, names, self._config.checkpoint.keep_last, is_latest)
        logger.info("checkpoint '%s' is complete in %s", manifest.tag, target.path)

    @property
    def has_failed(self) -> bool:
        """Return True if a background save has failed on this rank."""
        return self._under_way is not None and self._under_way[0].has_failed

    def wait(self) -> None:
        """Wait until a pending save is complete. Raise CheckpointError on every rank if it failed."""
        if self._under_way is None:
            return
        job, folder, tag = self._under_way
        what = f"saving checkpoint '{tag}' to {folder.path}"
        job.wait_written()
        try:
            # Parts first: without the part of a failed rank, rank 0's thread would wait on, and only `cancel` below
            # ends it.
            raise_together(self._world, job.write_error, what, _INTACT)
            job.wait_committed()
            raise_together(self._world, job.commit_error, what, _INTACT)
        except CheckpointError:
            job.cancel()
            self._discard(folder, tag)
            self._under_way = None
            raise
        self._under_way = None

    def _discard(self, folder: CheckpointFolder, tag: str) -> None:
        if self._world.rank == 0:
            folder.discard(tag)

    def wait_alone(self) -> None:
        """Wait for this rank's part of a pending save, without the other ranks. For use after an error."""
        if self._under_way is not None:
            self._under_way[0].wait_written()

    # -- loading --------------------------------------------------------------------------------------------------

    def load(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        registered: Mapping[str, Any],
        scheduler: Any,
        begin: Callable[[], None],
    ) -> tuple[Any, Mapping[str, Any], dict[str, Any]]:
        """Load parameters, optimizer states and random states. Returns (training as of `save`, config, client state).

        registered: the caller's client state. Its objects with a `load_state_dict`, and the scheduler, load their
        states before anything else changes; if a rank fails, they get their present states back. begin: called before
        parameters and states change, which cannot be undone. Raises NoCheckpointError without a checkpoint,
        CheckpointError if it is damaged or of another model.
        """
        self.wait()
        target, tag = self._find(folder, tag)
        what = f"loading checkpoint '{tag}' from {target.path}"
        undo = ExitStack()
        # First everything that can fail without a change, or be undone. Below `changed` parameters and states follow.
        try:
            with all_or_none(self._world, what, partial(_offer, target, tag, "Nothing was changed.")):
                checkpoint = target.open(tag)
                weights, states = checkpoint.weights, checkpoint.states
                training = read_training(checkpoint.manifest.training)
                scalars: dict[int | str, dict[str, Any] | None] = {}
                for rank in range(checkpoint.manifest.num_files):  # a rank may lack all parameters of a group
                    for key, own in read_scalars(checkpoint.own_state(rank)).items():  # each has some of its states
                        scalars[key] = scalars.get(key) if own is None else {**(scalars.get(key) or {}), **own}
                # Other ranks have no place for the rest, so all take rank 0's state.
                own_state = checkpoint.own_state(self._world.rank if self._has_same_ranks(checkpoint) else 0)
                own_client_state = read_client_state(own_state)
                random = read_random_state(own_state["random"], self._world.device)
                were_trained = {name for names in training["learning_rates"].get("members") or () for name in names}
                fitted = check_fits(checkpoint, training, scalars, self._named, self._optimizer, scheduler)
                training, scalars = fitted
                load_states(registered, own_client_state, undo)
                # Of all ranks, since a stage of a pipeline may have been another rank's; this rank's own counts most.
                others = map(checkpoint.own_state, range(checkpoint.manifest.num_files))
                load_extra_states(self._named.module, [*others, own_state], undo)
                load_states({"": scheduler}, {"": training["learning_rates"]["scheduler"]}, undo)
            faults = self._frozen.faults(checkpoint.manifest.left_out)
            if faults:
                raise CheckpointError(f"{what}: {faults[0]}. {_offer(target, tag, 'Nothing was changed.')}")
        except BaseException:
            undo.close()
            raise
        begin()
        changed = "Parameters were read in part: load another checkpoint before you train on."
        in_it = [name for name in self._frozen.infos if name in weights.tensors]
        # `note_read` compares with these: values that only this checkpoint has must be in the next checkpoint too.
        before = self._frozen.digests(in_it) if self._config.checkpoint.exclude_frozen_parameters else {}
        with all_or_none(self._world, what, partial(_offer, target, tag, changed)):
            params = self._named.whole.params
            self._optimizer.by_parameter.make_states(training["num_steps"], states_in(checkpoint), scalars, params)
            shared = self._named.has_replicas  # replicas read the same values, perhaps on this host
            own_weights = self._named.weights(changes=True)
            weights.read([one for one in own_weights if one.name not in checkpoint.manifest.left_out], shared)
            self._read_buffers(weights)
            own_states = self._named.states(changes=True)
            states.read([one for one in own_states if not is_new_remainder(one.name, states)], shared)
            self._read_rank_states(states)
            checkpoint.averages.read(self._named.averages() if checkpoint.averages.tensors else [], shared)
        self._named.publish()
        self._frozen.note_read(before)
        # After the weights: averages that the checkpoint lacks restart from them.
        self._restore_averages(training["averages"])
        if training.get("outer") is not None and not self._world.rank:
            logger.warning("%s", _ISLAND_LEFT)
        frozen = sorted(were_trained - {name for names in self._named.option_groups for name in names})
        if frozen and not self._world.rank:
            logger.warning(_NOW_FROZEN, frozen[0], f" and {len(frozen) - 1} more" if frozen[1:] else "")
        self._restore_random(checkpoint, random)
        logger.info("checkpoint '%s' (step %d) loaded from %s", tag, checkpoint.manifest.step, target.path)
        return training, checkpoint.manifest.config, own_client_state

    # -- parts of a checkpoint ------------------------------------------------------------------------------------

    def _own_state(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state beside tensors."""
        return {
            "random": random_state(self._world.device),
            "client_state": encode_client_state(client_state),
            "extra": encode_extra_states(self._named.module),
            "scalars": encode(self._optimizer.by_parameter.scalar_states(), "optimizer state"),
        }

    def _chunk_views(self, left_out: Collection[str]) -> list[ChunkView]:
        """Return this rank's part of all tensors by full name, except these parameters."""
        weights = [chunk_view for chunk_view in self._named.weights(saves=True) if chunk_view.name not in left_out]
        states = self._named.states(saves=True)
        states += self._named.rank_states()
        found = [_prefixed(MODEL, chunk_view) for chunk_view in weights] + [_prefixed(STATE, state) for state in states]
        found += [_prefixed(AVERAGE, chunk_view) for chunk_view in self._named.averages(saves=True)]
        if self._named.holds_buffers:
            for name, buffer in self._named.buffers().items():
                found.append(ChunkView(MODEL + name, tuple(buffer.shape), 0, buffer.detach().reshape(-1)))
        if self._world.rank == 0:
            for name, count in self._steps().items():
                # float32, as torch's optimizers keep `step`.
                found.append(ChunkView(name, (), 0, torch.tensor([float(count)])))
        return found

    @property
    def _updated(self) -> dict[str, nn.Parameter]:
        """Return the parameters with optimizer states, of the whole model."""
        keys = self._named.catalog.state_keys
        return {name: param for name, param in self._named.whole.params.items() if name in keys}

    def _steps(self) -> dict[str, int]:
        """Return the number of updates, and of each parameter that missed updates, by full name."""
        done, trained = self._optimizer.num_steps, self._updated
        missed = {f"{STEP}.{name}": self._optimizer.counts.missed[id(param)] for name, param in trained.items()}
        return {STEP: done, **{name: done - count for name, count in missed.items() if count}}

    def _optimizer_names(self, has_states: bool) -> OptimizerNames:
        record = OPTIMIZERS.get(self._optimizer.kind)
        has_step = has_states and (record is None or record.keeps_step)
        return OptimizerNames(tuple(self._updated) if has_step else (), self._named.option_groups)

    def _state_dtypes(self) -> dict[str, dict[str, torch.dtype]]:
        """Return {parameter: {state: dtype}}. A collective, since a rank knows only its parameters."""
        found: dict[StateKey, dict[str, torch.dtype]] = {}
        for one in self._world.gather_objects(self._optimizer.by_parameter.state_dtypes()):
            found.update(one)
        keys = self._named.catalog.state_keys
        by_name = {name: dict(found[key]) for name, key in keys.items() if key in found}
        for of_rank in self._world.gather_objects(self._optimizer.by_parameter.rank_state_dtypes()):
            for name, dtypes in of_rank.items():
                by_name.setdefault(name, {}).update(dtypes)
        return by_name

    def _manifest(
        self,
        tag: str,
        has_own_tag: bool,
        step: int,
        training: Any,
        states: Mapping[str, Mapping[str, torch.dtype]],
        left_out: dict[str, LeftOut],
    ) -> Manifest:
        catalog = self._named.catalog
        written = {name: info for name, info in catalog.parameters.items() if name not in left_out}
        tensors = {MODEL + name: info for name, info in (*written.items(), *catalog.buffers.items())}
        for name, dtypes in states.items():
            for state, dtype in dtypes.items():
                tensors[f"{STATE}{name}.{state}"] = TensorInfo(catalog.parameters[name].shape, dtype)
        if self._optimizer.averages is not None:
            tensors |= {AVERAGE + name: _at_least_float32(catalog.parameters[name]) for name in catalog.state_keys}
        tensors |= dict.fromkeys(self._steps(), TensorInfo((), torch.float32))
        return Manifest(
            tag=tag,
            step=step,
            # `CheckpointFolder.commit` sets it, when all parts are there.
            saved_at=0.0,
            has_own_tag=has_own_tag,
            versions={"lowtide": version("lowtide"), "torch": torch.__version__, "python": platform.python_version()},
            topology={
                "world_size": self._world.size,
                "stage": self._config.zero_optimization.stage,
                "shard_size": self._mesh.data_size // self._mesh.axes["replica"].size,
                "replicas": self._mesh.axes["replica"].size,
                "pipeline": self._mesh.axes["pipe"].size,
            },
            tensors=tensors,
            compute_dtypes={name: catalog.compute_dtypes[name] for name in written},
            aliases={alias: name for alias, name in catalog.aliases.items() if name in written},
            left_out=left_out,
            training=training,
            config=self._config.as_dict(),
            model_files=model_files(self._named.module, first_floating(catalog.compute_dtypes.values())),
        )

    # -- pieces of `load` -----------------------------------------------------------------------------------------

    def _find(self, path: str | os.PathLike[str], tag: str | None) -> tuple[CheckpointFolder, str]:
        """Return the folder, and the tag to load as rank 0 sees the folder."""
        found: str | None = None
        absent = ""
        with all_or_none(self._world, f"looking for a checkpoint in {display_path(path)}"):
            folder = CheckpointFolder(path)
            if self._world.rank == 0:
                try:
                    # Rank 0 alone: on a network disk another rank may not see the newest folder yet.
                    found = folder.find(tag)
                except NoCheckpointError as error:
                    absent = str(error)
                    if (folder.path / "island0").is_dir():
                        absent += (
                            "; the folder has islands, a feature of earlier versions: load a subfolder, such as island0"
                        )
        found, absent = self._world.broadcast_object((found, absent))
        if found is None:
            raise NoCheckpointError(absent)
        return folder, found

    def _read_buffers(self, source: CheckpointReader) -> None:
        for name, buffer in self._named.buffers().items():
            flat = buffer.detach().contiguous().view(-1)  # a view of the buffer, or a copy if it is not contiguous
            source.read([ChunkView(name, tuple(buffer.shape), 0, flat)])
            if flat.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(flat.view(buffer.shape))

    def _read_rank_states(self, states: CheckpointReader) -> None:
        """Read the states that each rank alone had; for another number of ranks, set them to zero."""
        own, dtypes = self._named.rank_states(), self._optimizer.by_parameter.rank_state_dtypes()
        split = [name.rpartition(".") for name in states.tensors]
        saved = {f"{param}.{state}" for param, _, state in split if is_rank_state(state) and param in dtypes}
        if saved == {f"{param}.{state}" for param, found in dtypes.items() for state in found}:
            states.read(own, False)
            return
        # Residuals belong to the messages of the saved run's ranks. Zeros only make the next message less exact.
        for one in own:
            one.values.zero_()
        if not self._world.rank:
            logger.warning("%s", _ERRORS_LEFT)

    def _restore_averages(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the state of averages after their values. saved: the checkpoint's record of the averages."""
        own = self._optimizer.averages
        if own is not None and saved is not None:
            own.num_updates = saved["num_updates"]
        elif own is not None:
            own.reset()
        if self._world.rank == 0 and (own is None) != (saved is None):
            logger.warning("%s", _AVERAGES_LEFT if own is None else _AVERAGES_BEGIN)

    def _has_same_ranks(self, checkpoint: Checkpoint) -> bool:
        """Return True if each rank takes the data of the rank with its number that has saved the checkpoint."""
        now, then = self._config.parallel, checkpoint.manifest.config.get("parallel")
        sizes = then if isinstance(then, dict) else {}
        are_same = all(sizes.get(axis, 1) == getattr(now, axis) for axis in ("pipeline", "tensor", "sequence"))
        return are_same and checkpoint.manifest.num_files == self._world.size

    def _restore_random(self, checkpoint: Checkpoint, states: Mapping[str, Any]) -> None:
        if self._has_same_ranks(checkpoint):
            set_random_state(states, self._world.device)
        else:
            logger.info(
                "random generators go on as they are: the checkpoint has the states of %d ranks, there are %d%s",
                checkpoint.manifest.num_files,
                self._world.size,
                " on other axes" if checkpoint.manifest.num_files == self._world.size else "",
            )


_ERRORS_LEFT = (
    "the checkpoint has no residuals of 1-bit momenta or low-rank gradients for this number of ranks: the residuals "
    "begin with zero"
)
_AVERAGES_LEFT = (
    "the checkpoint has moving averages of the weights, but they were not loaded, and the next checkpoint will lack "
    "them: call engine.ema(decay) before engine.load_checkpoint to continue them"
)
_ISLAND_LEFT = (
    "the checkpoint is of an island, a feature of earlier versions: its parameters and states are loaded, the state "
    "that islands shared is not"
)
_NOW_FROZEN = (
    "parameters that the checkpoint has trained are in no parameter group here: '%s'%s. They keep the loaded values, "
    "and their optimizer states are dropped. To train them on, call engine.add_param_group before the load"
)
_AVERAGES_BEGIN = "the checkpoint has no moving averages of the weights: they restart from the loaded weights"


def _offer(folder: CheckpointFolder, tag: str, result: str) -> str:
    """Return the hint of a failed load. Reads the description of every checkpoint in the folder."""
    other = folder.alternative_to(tag)
    return (
        f"The newest other checkpoint is '{other}': load_checkpoint(folder, tag=\"{other}\"). " if other else ""
    ) + result


def _prefixed(prefix: str, chunk_view: ChunkView) -> ChunkView:
    return replace(chunk_view, name=prefix + chunk_view.name)


def _at_least_float32(info: TensorInfo) -> TensorInfo:
    return replace(info, dtype=torch.promote_types(info.dtype, torch.float32))
