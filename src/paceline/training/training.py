"""`paceline.Training`: training whose bits do not depend on the number of ranks.

    training = paceline.Training(model, optimizer, loader, shards=8, seed=1)
    for epoch in training.epochs(10):
        for batch in training.batches():              # one global batch
            for x, y in batch.shards():               # those of its shards that this rank computes
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                batch.log(loss=loss)
            optimizer.step()                          # `.grad` is that of the global batch
            optimizer.zero_grad()

Everything that goes into a shard's result is a function of (seed, step, shard), and results of
shards are added in one fixed tree. So it does not matter who computes which of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline import checkpoint
from paceline._malloc import keep_freed_memory
from paceline.backend.host_engine import HostEngine
from paceline.backend.process_group import PacelineGroup
from paceline.checkpoint.restoration import way_back
from paceline.data import DataLoader
from paceline.data.evaluation_setting import EvaluationSetting, announce
from paceline.data.rng import check_seed
from paceline.ddp.buffers import broadcast
from paceline.errors import ConfigError, MismatchError, PacelineError, StepError
from paceline.launch.process_context import current_context
from paceline.rank_env import current_rank_and_world
from paceline.telemetry.recorder import recorder
from paceline.training.audit import Audit, AuditPlan
from paceline.training.automatic_saves import AutomaticSaves, SaveEvery
from paceline.training.checkpoint_directory import CheckpointDirectory
from paceline.training.fingerprint import Fingerprint, differences, take_fingerprint
from paceline.training.generations import Generations
from paceline.training.global_batch import GlobalBatch
from paceline.training.group_exchange import Exchange, GroupExchange, SingleRank
from paceline.training.input_alignment import align_inputs, align_model
from paceline.training.model_checks import (
    Optimizers,
    check_loader,
    check_model,
    check_state,
    named_optimizers,
)
from paceline.training.parameter_set import ParameterSet
from paceline.training.shard_buffers import BufferSet, named_buffers
from paceline.training.shard_inputs import EpochInputs
from paceline.training.shard_pass import PassResult, PassSetting
from paceline.training.shard_plan import Shard, ShardPlan
from paceline.training.shard_price import ShardPrice
from paceline.training.shard_queue import HostClaims, NoClaims, ShardQueue
from paceline.training.shard_random import ShardSeeds, TrainingRandomState
from paceline.training.shared_exchange import SharedExchange
from paceline.training.state_digest import DIGESTS, append_line, digest_line, tensor_digest
from paceline.training.training_ranks import TrainingRanks
from paceline.training.work_sharing import WorkSharing

__all__ = ["Training"]

_VERSION = 1


class Training:
    """Trains `model` to the same bits at any number of ranks.

    A global batch is cut into `shards` parts, which the ranks share out. Weights, buffers,
    optimizer state, logged metrics and the order of the data do not depend on how many ranks there
    are, or on which rank computes what; nor does a run that was saved on one number of ranks and
    goes on, from the middle of an epoch, on another.

    Code outside of the loop over `batch.shards()` runs on every rank and must do the same there.

    Args:
        model: the bare module.
        optimizer: an optimizer, or several: a list, or a dictionary with their names.
        loader: a `paceline.DataLoader`, whose batches are global.
        shards: how many parts a global batch is cut into. It bounds how many ranks are of use.
        seed: of the random numbers that are drawn during training.
        threads: of torch, while it trains; bits depend on it.
        state: further objects to save and load, by name: schedulers, a GradScaler, an average of
            the weights, anything with `state_dict` and `load_state_dict`.
        checkpoint: a directory. Training goes on from the newest whole checkpoint in it, if there
            is one, and writes new ones: every `save_every`, when a signal asks for it
            (`paceline.save_requested`), and at the end of `epochs()`. All ranks read it; rank 0
            writes, in the background. SIGTERM saves and ends the loops.
        save_every: a number of steps, or a `datetime.timedelta`.
        keep: how many checkpoints are kept.
        audit_every: every so many steps another rank computes one shard a second time. If it finds
            other bytes, every rank raises `MismatchError`: a broken processor or memory is found,
            or code that depends on who runs it.
        steal: let ranks that are through compute shards of slower ones, and deal out fewer to
            those. False leaves every rank its even share. Bits do not depend on it.
        measure_shards: measure in a few of the first steps what it costs that there are more
            shards than ranks, and say so in one line if it is more than a tenth. Rank 0 runs the
            model's forward and backward a few times more for it, with inputs of a shard; that
            changes nothing that is trained. Not in an elastic job.
        strict: False only warns where ranks, or a saved state, are of another kind of machine or
            another version of torch, which may change bits.

    Raises:
        ConfigError: something cannot be trained this way; the message says what to use instead.
        MismatchError: ranks disagree about an argument, or are on different kinds of machines.

    Example:
        ```python
        training = paceline.Training(model, optimizer, loader, shards=4)
        for epoch in training.epochs(2):
            for batch in training.batches():
                for x, y in batch.shards():
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    batch.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
        print(training.metrics["loss"])
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        loader: DataLoader[Any],
        *,
        shards: int = 8,
        seed: int = 0,
        threads: int = 1,
        state: Mapping[str, Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: SaveEvery = None,
        keep: int = 3,
        audit_every: int | None = None,
        steal: bool = True,
        measure_shards: bool = True,
        strict: bool = True,
    ) -> None:
        check_model(model)
        self._sampler = check_loader(loader)
        self._optimizers = named_optimizers(optimizer, model)
        self._state = check_state(state or {})
        _prepare_scalers(self._state, model)
        self._plan = ShardPlan(self._sampler.batch_size, shards)
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, found {threads}")
        self.model, self.loader = model, loader
        self.shards, self.seed, self.threads = shards, check_seed(seed), threads
        self.strict, self.steal = strict, steal
        self._audits = AuditPlan(audit_every, seed)
        self._generations = self._elastic_generations()
        self._exchange: Exchange = (
            _exchange(shards, steal) if self._generations is None else self._generations.exchange
        )
        # Not in an elastic job: a rank that is killed in a step would leave parameters that the
        # others have as well half stepped.
        self._ranks = (
            TrainingRanks(
                self._exchange,
                model,
                self._optimizers.values(),
                shards=shards,
                # A GradScaler looks for overflows in sums, before the step.
                may_leave_sums=not _has_scaler(self._state),
            )
            if isinstance(self._exchange, SharedExchange)
            else None
        )
        self._price = (
            ShardPrice(model, shards, self._plan.batch_size // shards, self._exchange.size)
            if measure_shards and self._generations is None and self._exchange.rank == 0
            else None
        )
        keep_freed_memory(current_rank_and_world()[1])
        align_model(model)
        self._epoch, self._batches_done, self._step = 0, 0, 0
        self._epoch_done = False
        self._batch: GlobalBatch | None = None
        self._inputs: EpochInputs | None = None
        self._counted_step = -1
        self._has_begun = False  # the first loop over the batches
        self._metrics: Mapping[str, float] = {}
        self._changed_buffers: set[str] = set()
        self._parameters = ParameterSet(model)
        self._ranges = loader.range_loader()
        self._saves = self._automatic_saves(checkpoint, save_every, keep)
        if self._generations is None:
            self._start()
        else:
            self._generations.begin()
            self._generations.report_step(self._step)
        self._evaluation = EvaluationSetting(threads, align_inputs, self._generations)
        announce(self._evaluation)
        for each in self._optimizers.values():
            each.register_step_pre_hook(self._before_optimizer_step)
        self._stopping = self._generations is not None and self._generations.has_left

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many global batches have been completed since training began."""
        return self._step

    @property
    def metrics(self) -> Mapping[str, float]:
        """`batch.metrics` of the global batch that was completed last. They are part of the state:
        after the loop over `batches()` they are there on every rank, also on one that joined an
        elastic job after the last batch of the epoch.
        """
        return self._metrics

    @property
    def epoch(self) -> int:
        """The epoch that is running, or the next one if none is."""
        return self._epoch

    @property
    def fingerprint(self) -> Fingerprint:
        """What else the bits depend on: the machine, torch, its settings."""
        return take_fingerprint()

    @property
    def stopping(self) -> bool:
        """Whether a signal (SIGTERM) has ended the loops: after a checkpoint was written, if there
        is a directory for them.
        """
        return self._stopping

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs up to `count`, from the one that training has reached."""
        while not self._stopping:
            if self._epoch_done:
                self._begin_next_epoch()
            if self._epoch >= count:
                break
            epoch = self._epoch
            yield epoch
            # A loop over its batches that was left early does not come back to them.
            if self._epoch == epoch and not self._stopping:
                self._epoch_done = True
        if self._saves is not None and not self._stopping:
            self._saves.finish(self._step, self._place, self.state_dict)

    def batches(self) -> Iterator[GlobalBatch]:
        """The global batches of the epoch, from the one that training has reached.

        While this loop runs, Python's, numpy's and torch's random number generators are seeded for
        every step and shard, and torch has `threads` threads; afterwards both are as before.

        If the loop before was left by an error inside a batch, it begins with that batch again,
        with gradients and buffers as they were before it: on a single rank, or if all ranks heard
        of the error.

        Raises:
            StepError: the loop over a batch's shards was left early.
        """
        self._abandon_left_batch()
        self._check_not_in_shards("training.batches() was called")
        if self._epoch_done:
            self._begin_next_epoch()
        self._has_begun = True
        with self._training_environment():
            buffers = BufferSet(self.model)
            self._find_parameters()
            inputs = self._inputs = self._epoch_inputs()
            setting, price = self._new_setting(buffers), self._price
            for number in range(self._batches_done, len(self._sampler)):
                plan = self._plan.cut(self._sampler.share(number).size)
                if self._parameters.has_changed():
                    self._find_parameters()
                    setting = self._new_setting(buffers)
                step, deals = self._step, self._exchange.sharing.deal(plan.shards)
                audit = self._audits.audit_of(step, deals)
                self._batch = GlobalBatch(
                    epoch=self._epoch,
                    number=number,
                    step=step,
                    plan=plan,
                    audit=audit,
                    price=price if price is not None and not price.is_done else None,
                    inputs=inputs.begin(number),
                    new_queue=functools.partial(
                        self._new_queue, self._exchange.sharing, deals, audit
                    ),
                    setting=setting,
                    seeds=functools.partial(ShardSeeds, self.seed, step),
                    on_complete=self._count_pass,
                )
                yield self._batch
                self._batch.close()
                self._batch = None
                if self._end_batch():
                    break
            else:
                self._epoch_done = True
            self._average_what_is_left()

    def _find_parameters(self) -> None:
        self._parameters = ParameterSet(self.model)
        if self._ranks is not None:
            self._ranks.enter_loop(self._parameters)

    def _new_setting(self, buffers: BufferSet) -> PassSetting:
        return PassSetting(
            self.model,
            self._parameters,
            buffers,
            self._exchange,
            self.threads,
            _raise if self._generations is None else self._generations.recover,
            self._ranks,
        )

    def _leave_batches(self) -> None:
        """The loop over the batches is over, or was left. A loop over shards that was left early is
        remembered: what follows must not use its gradients.
        """
        if self._ranks is not None:
            self._ranks.leave_loop()
        if self._inputs is not None:
            self._inputs.release()
            self._inputs = None
        if self._batch is not None:
            self._batch.release_inputs()
            if not self._batch.is_open:
                self._batch = None

    def _abandon_left_batch(self) -> None:
        """A loop over the batches that is over has no inputs any more."""
        if self._batch is not None and self._inputs is None:
            self._batch.abandon(ranks=self._exchange.size)
            if not self._batch.is_open:
                self._batch = None

    @contextlib.contextmanager
    def _training_environment(self) -> Iterator[None]:
        generators, threads = TrainingRandomState(), torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            generators.restore()
            self._leave_batches()

    def _end_batch(self) -> bool:
        """Between two batches; True if training is to stop."""
        generations, digests = self._generations, os.environ.get(DIGESTS)
        if digests or self._saves is not None:
            self._average_what_is_left()  # gradients are part of the state
        if digests and self._exchange.rank == 0:
            append_line(digests, self.digest())
        is_last = self._batches_done == len(self._sampler) > 1
        if generations is not None and not generations.end_batch(self._step, is_last=is_last):
            self._stopping = True
        elif self._saves is not None and (generations is None or generations.is_settled):
            self._stopping = self._saves.after_step(self._step, self._place, self.state_dict)
        elif generations is not None and generations.is_settled:
            self._stopping = generations.save_request().stop
        return self._stopping

    @property
    def _place(self) -> tuple[int, int, int]:
        done = self._epoch_done
        return self._step, self._epoch + done, 0 if done else self._batches_done

    def _average_what_is_left(self) -> None:
        if self._ranks is not None:
            self._ranks.average_what_is_left()

    def averaged_gradients(self) -> dict[str, torch.Tensor]:
        """A copy of every gradient's mean over the global batch, by the parameter's name. To be
        called on every rank, after the loop over `batch.shards()`.

        Where an optimizer with one_pass=True takes the sum in its step, `.grad` is a part of this
        rank's gradient until then; from here on it is the mean. Elsewhere it is that anyway.
        """
        self._check_not_in_shards("training.averaged_gradients() was called")
        self._average_what_is_left()
        return {
            name: parameter.grad.detach().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def _begin_next_epoch(self) -> None:
        self._epoch, self._batches_done, self._epoch_done = self._epoch + 1, 0, False
        self._sampler.position.seek(self._epoch, 0)

    def _count_pass(self, result: PassResult) -> None:
        self._changed_buffers |= result.changed_buffers
        if self._ranks is not None:
            self._ranks.count_pass()
        if self._generations is not None:
            self._generations.count_pass()
        assert self._batch is not None
        self._exchange.sharing.record(result.paces, result.computed)
        # Another pass over the same batch is not another step.
        if self._counted_step != self._batch.step:
            self._counted_step = self._batch.step
            self._step += 1
            self._batches_done += 1
            recorder.reach_step(self._step, self._batch.samples)
            self._sampler.position.seek(self._epoch, self._batches_done)
            self._metrics = {}
        self._metrics = {**self._metrics, **result.metrics}

    def _epoch_inputs(self) -> EpochInputs:
        """The inputs of the rest of the epoch, seen from now."""
        first_step, first = self._step, self._batches_done

        def dealt(number: int) -> Sequence[Shard]:
            return self._shards_to_load(number, first_step + number - first)

        return EpochInputs(self._ranges, self._epoch, range(first, len(self._sampler)), dealt)

    def _shards_to_load(self, number: int, step: int) -> Sequence[Shard]:
        deals = self._deals(number)
        audit, rank = self._audits.audit_of(step, deals), self._exchange.rank
        if audit is not None and audit.auditor == rank and audit.shard not in deals[rank]:
            return [*deals[rank], audit.shard]
        return deals[rank]

    def _new_queue(
        self, sharing: WorkSharing, deals: Sequence[Sequence[Shard]], audit: Audit | None
    ) -> ShardQueue:
        """For a pass over the current batch, which was dealt out like this when it began."""
        if self._exchange.sharing is not sharing:
            # Ranks have changed since.
            assert self._batch is not None
            deals = self._deals(self._batch.number)
            audit = self._audits.audit_of(self._batch.step, deals)
        return self._exchange.sharing.queue(deals, audit)

    def _deals(self, number: int) -> list[Sequence[Shard]]:
        """Each rank's shards of a global batch."""
        plan = self._plan.cut(self._sampler.share(number).size)
        return self._exchange.sharing.deal(plan.shards)

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check_not_in_shards("optimizer.step() was called")
        if not self._has_begun and any(
            p.grad is not None for group in optimizer.param_groups for p in group["params"]
        ):
            raise StepError(
                "optimizer.step() was called before the first loop over training.batches(): these "
                "gradients are of this rank alone. Loop over training.batches() and batch.shards() "
                "instead of the loader"
            )
        if self._batch is not None and not self._parameters.has_all_of(optimizer):
            raise StepError(
                "the optimizer has parameters that it or the model did not have when the loop over "
                "training.batches() began: add parameters between epochs"
            )
        if any(argument is not None for argument in (*args[1:], kwargs.get("closure"))):
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure) computes gradients by itself, which "
                "would be those of one rank. Use an optimizer that needs no closure"
            )

    def _check_not_in_shards(self, what: str) -> None:
        if self._batch is not None:
            self._batch.check_not_in_loop(what)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on, on any number of ranks: after the global batch that was
        completed last.

        Call it after `optimizer.step()`. After the loop over `batches()` it counts the epoch as
        over: call it at the end of the epoch's body.

        Raises:
            StepError: this is inside the loop over `batch.shards()`.
        """
        self._check_not_in_shards("training.state_dict() was called")
        self._refuse_left_sums()
        step, epoch, batch = self._place
        model = self.model.state_dict()
        return {
            "version": _VERSION,
            **self._identity,
            "fingerprint": self.fingerprint,
            "step": step,
            "metrics": dict(self._metrics),
            "loader": self._sampler.state_at(epoch, batch),
            "model": model,
            "optimizers": {name: each.state_dict() for name, each in self._optimizers.items()},
            "state": {name: each.state_dict() for name, each in self._state.items()},
            # What a state dict of torch leaves out, but the next step depends on.
            "buffers": {
                buffer.name: buffer.current.detach()
                for buffer in named_buffers(self.model)
                if buffer.name in self._changed_buffers and buffer.name not in model
            },
            "gradients": {
                name: parameter.grad
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            },
        }

    def _refuse_left_sums(self) -> None:
        deferred = None if self._ranks is None else self._ranks.deferred
        if deferred is not None and deferred.are_left:
            raise StepError(
                "training.state_dict() was called between the loop over batch.shards() and "
                "optimizer.zero_grad(), where gradients are part of the state, but with "
                "one_pass=True each rank has its own: call optimizer.zero_grad(), or "
                "training.averaged_gradients() on every rank, first"
            )

    def load_state_dict(self, state: Mapping[str, Any], strict: bool | None = None) -> None:
        """Go on from a saved state, saved on any number of ranks.

        Args:
            state: what `state_dict()` returned.
            strict: whether another kind of machine or version of torch is refused; that of the
                constructor by default. False only warns.

        If it fails, everything holds what it held before.

        Raises:
            ConfigError: the state is of other data, another order, or another way of training.
            StepError: this is inside the loop over `batch.shards()`.
        """
        self._abandon_left_batch()
        self._check_not_in_shards("training.load_state_dict() was called")
        if self._batch is not None:
            raise ConfigError(
                "load_state_dict() was called inside the loop over training.batches(), which would "
                "go on with the batches of before: load before the loops"
            )
        self._check_saved(state, self.strict if strict is None else strict)
        put_back = self._way_back()
        try:
            self._load(state)
        except BaseException:
            put_back()
            raise

    def _way_back(self) -> Callable[[], None]:
        """A function that puts back all that a state is loaded into."""
        parts = (self.model, *self._optimizers.values(), *self._state.values())
        ways = [way for way in map(way_back, parts) if way is not None]
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        position = self._sampler.position.epoch, self._sampler.position.batch
        place = self._epoch, self._batches_done, self._step, self._counted_step, self._epoch_done
        changed_buffers, metrics = self._changed_buffers, self._metrics

        def put_back() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._sampler.position.seek(*position)
            self._epoch, self._batches_done, self._step = place[:3]
            self._counted_step, self._epoch_done = place[3:]
            self._changed_buffers, self._metrics = changed_buffers, metrics
            for way in ways:
                way()

        return put_back

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state["loader"])
        self.model.load_state_dict(state["model"])
        for kind, objects in (("optimizers", self._optimizers), ("state", self._state)):
            for name, each in objects.items():
                each.load_state_dict(state[kind][name])
        self._epoch, self._batches_done = self._sampler.position.epoch, self._sampler.position.batch
        self._step, self._counted_step, self._epoch_done = state["step"], -1, False
        self._metrics = dict(state.get("metrics", {}))
        self._load_extras(state)

    def _load_extras(self, state: Mapping[str, Any]) -> None:
        self._changed_buffers = set(state["buffers"])
        with torch.no_grad():
            for buffer in named_buffers(self.model):
                if buffer.name in state["buffers"]:
                    buffer.current.copy_(state["buffers"][buffer.name])
        if self._ranks is not None and self._ranks.deferred is not None:
            self._ranks.deferred.forget_gradients()
        for name, parameter in self.model.named_parameters():
            gradient = state["gradients"].get(name)
            # Sparse tensors are copied as they are; a dense one gets the parameter's layout.
            if gradient is not None and not gradient.is_sparse:
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient

    def digest(self) -> str:
        """One line with a digest for every gradient, parameter, buffer and entry of an optimizer's
        or other object's state. Print it in every step of two runs that should be the same, and
        `paceline diff` tells where they part.

        Raises:
            StepError: this is inside the loop over `batch.shards()`.
        """
        state = self.state_dict()
        # What is computed first comes first: there the cause is to be sought.
        kinds = ("gradients", "buffers", "model", "optimizers", "state")
        return digest_line(self._step, {kind: state[kind] for kind in kinds})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file with `paceline.save`; all ranks call it."""
        checkpoint.save(path, training=self)

    def load(self, path: str | os.PathLike[str], strict: bool | None = None) -> None:
        """Read a file of `save`; all ranks call it. See `load_state_dict`."""
        checkpoint.load(path, training=_Loading(self, strict))

    @property
    def _identity(self) -> dict[str, Any]:
        """What a saved state must have in common with this training."""
        return {
            "shards": self.shards,
            "seed": self.seed,
            "threads": self.threads,
            "optimizer kinds": {
                name: type(each).__qualname__ for name, each in self._optimizers.items()
            },
            "state names": sorted(self._state),
        }

    def _check_saved(self, state: Mapping[str, Any], strict: bool) -> None:
        missing = {"version", "step", "loader", "model", *self._identity} - set(state)
        if missing or state["version"] != _VERSION:
            raise ConfigError(
                f"this is not a state that paceline.Training saved, or one of another version: "
                f"found {sorted(state)}"
            )
        changed = [
            f"{name} was {state[name]!r} and is now {value!r}"
            for name, value in self._identity.items()
            if state[name] != value
        ]
        if changed:
            raise ConfigError(
                f"the saved state was trained in another way: {'; '.join(changed)}. Make the "
                "Training with the arguments it was saved with (the number of ranks may differ)"
            )
        found = differences(state["fingerprint"], self.fingerprint)
        _report_differences("the state was saved elsewhere", found, strict)

    def _automatic_saves(
        self, directory: str | os.PathLike[str] | None, save_every: SaveEvery, keep: int
    ) -> AutomaticSaves | None:
        if directory is None:
            if save_every is not None:
                raise ConfigError(
                    f"save_every={save_every!r} needs checkpoint=, the directory to save to"
                )
            return None
        files = CheckpointDirectory(directory, keep)
        return AutomaticSaves(files, save_every, self._exchange, self._generations)

    # --- at the start -----------------------------------------------------------------------------

    def _start(self) -> None:
        """Together with all other ranks: from the beginning, or from a checkpoint."""
        self._make_ranks_agree()
        if self._saves is not None:
            self._saves.resume(self.load_state_dict)
            self._saves.skip(self._place)

    def _elastic_generations(self) -> Generations | None:
        """Those of the elastic job that this rank belongs to; None in any other job."""
        context = current_context()
        if context is None or context.elastic is None:
            return None
        return Generations(
            context.elastic,
            context,
            alone=_alone(self.shards),
            new_exchange=functools.partial(_exchange, self.shards, self.steal),
            start=self._start,
            give=self.state_dict,
            take=self._take_over,
        )

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a rank that trains already."""
        self.load_state_dict(state)
        if self._saves is not None:
            self._saves.skip(self._place)

    def _make_ranks_agree(self) -> None:
        """Compare what must be the same on every rank; parameters and buffers follow rank 0."""
        if self._exchange.size == 1:
            return
        own = {
            "arguments": {**self._identity, **self._sampler.state_at(0, 0), "steal": self.steal},
            "fingerprint": self.fingerprint,
            "model": [
                tensor_digest(tensor)
                for tensor in (*self.model.parameters(), *self.model.buffers())
            ],
            "optimizers": repr([_hyperparameters(each) for each in self._optimizers.values()]),
        }
        ranks = [facts for facts, _ in self._exchange.gather(own)]
        for name in ("arguments", "optimizers"):
            values = {rank: str(facts[name]) for rank, facts in enumerate(ranks)}
            if len(set(values.values())) > 1:
                table = "\n".join(f"  rank {rank}: {value}" for rank, value in values.items())
                raise MismatchError(
                    f"ranks disagree about the {name} of paceline.Training:\n{table}", values
                )
        for rank, facts in enumerate(ranks):
            found = differences(ranks[0]["fingerprint"], facts["fingerprint"])
            _report_differences(f"rank {rank} differs from rank 0", found, self.strict)
        if any(facts["model"] != ranks[0]["model"] for facts in ranks):
            group = dist.group.WORLD
            assert group is not None
            broadcast(group, [*self.model.parameters(), *self.model.buffers()], 0)


class _Loading:
    """A training that `paceline.load` loads into."""

    def __init__(self, training: Training, strict: bool | None) -> None:
        self._training, self._strict = training, strict

    def way_back(self) -> Callable[[], None]:
        return self._training._way_back()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.load_state_dict(state, self._strict)


def _exchange(shards: int, steal: bool) -> Exchange:
    rank, world_size = current_rank_and_world()
    if world_size == 1:
        return _alone(shards)
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        raise ConfigError(
            f"this is rank {rank} of {world_size}, but there is no process group: call "
            "paceline.init_process_group() before making the Training"
        )
    if world_size > shards:
        raise ConfigError(
            f"{world_size} ranks share shards={shards}, so some would never have anything to "
            f"compute: use at most {shards} ranks, or more shards (another number of shards gives "
            "other bits)"
        )
    if isinstance(group, PacelineGroup) and isinstance(group.engine, HostEngine):
        # Made in any case: that ranks disagree about `steal` is found out later.
        claims = HostClaims(group.engine.comm, shards)
        sharing = WorkSharing(
            rank, world_size, shards, claims if steal else NoClaims(), follows_speed=steal
        )
        return SharedExchange(group, shards, sharing)
    sharing = WorkSharing(rank, world_size, shards, NoClaims(), follows_speed=steal)
    return GroupExchange(group, sharing)


def _alone(shards: int) -> SingleRank:
    return SingleRank(WorkSharing(0, 1, shards, NoClaims(), follows_speed=False))


def _prepare_scalers(state: Mapping[str, Any], model: nn.Module) -> None:
    """A GradScaler sets itself up when it first scales a loss. A rank whose shards others have
    computed, or that has just joined, comes to `scaler.step` without having scaled one.
    """
    parameter = next(model.parameters(), None)
    for each in state.values():
        if isinstance(each, torch.amp.GradScaler) and parameter is not None:
            each.scale(torch.zeros((), device=parameter.device))


def _has_scaler(state: Mapping[str, Any]) -> bool:
    return any(isinstance(each, torch.amp.GradScaler) for each in state.values())


def _raise(error: Exception) -> None:
    raise error


def _report_differences(what: str, found: list[str], strict: bool) -> None:
    if not found:
        return
    message = f"{what}, so that bits may differ: {'; '.join(found)}"
    if strict:
        raise PacelineError(f"{message}. Use the same there, or strict=False to accept it")
    warnings.warn(message, stacklevel=4)


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, str]]:
    return [
        {name: str(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
