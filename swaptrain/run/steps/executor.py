"""Runs programs: the one loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from swaptrain.compute.gradient_norms import GradientNorms, clip_coefficient, mean_loss
from swaptrain.compute.operations import Operations
from swaptrain.compute.slab_tensors import Slabs
from swaptrain.durable.activations import Activations
from swaptrain.durable.commits import Commits
from swaptrain.errors import NotFiniteError, StoppedBySignal
from swaptrain.memory.tier import Tier
from swaptrain.program.durability import Durability, Made
from swaptrain.program.instructions import Instruction, Operation, Program
from swaptrain.program.overlap import side_by_side
from swaptrain.ranks.exchange_ahead import Exchanges, Moving
from swaptrain.ranks.together import Together
from swaptrain.run.memory_guard import BudgetGuard
from swaptrain.run.steps.step_state import StepState
from swaptrain.spans import span, spanned

__all__ = ["Executor"]


@dataclass
class _Begun:
    """An instruction that computes, or has computed, and that the rest of the run has not seen."""

    position: int
    instruction: Instruction
    slabs: Slabs
    made: Tensor | GradientNorms | None
    """A loss or norms, on the host after the mark."""
    seconds: float
    """In which the host computed it, or had the device begin."""
    mark: Any
    """Of the device, after it."""


class Executor:
    """Executes instructions in order, each on slabs that the tier brought.

    A device that computes beside the host has the next instruction begun while it computes one.
    """

    def __init__(
        self,
        tier: Tier,
        operations: Operations,
        commits: Commits,
        guard: BudgetGuard,
        *,
        values: Activations | None = None,
        lag: int = 1,
        together: Together | None = None,
        begin: Callable[[Instruction], None] = lambda _: None,
        tick: Callable[[Instruction], None],
        observe: Callable[[int, Instruction], None] = lambda *_: None,
        computed: Callable[[Instruction, Slabs], None] = lambda *_: None,
        weigh: Callable[[Instruction, Slabs], None] = lambda *_: None,
    ) -> None:
        """Take what instructions act on; `values` keeps what forwards make, for a resume.

        A kill repeats the backward of `lag` segments at most. `together` are the other ranks.
        `observe` hears of each instruction after it, and of the step that it belongs to;
        `computed` of each one and its slabs, before anything that it made is written, and `weigh`
        too, which looks at what memory holds.
        """
        self._begin, self._observe, self._computed, self._weigh = begin, observe, computed, weigh
        self._tier, self._operations, self._commits = tier, operations, commits
        self._guard, self._tick = guard, tick
        self._values, self._lag, self._together = values, lag, together
        self._exchanges = None if together is None else Exchanges(together.exchange, tier)
        self._sending: Moving | None = None
        """Sums on their way to their owner, which stay here until then."""

    def run(
        self,
        program: Program,
        state: StepState,
        following: Program = (),
        *,
        quiet: bool = False,
    ) -> None:
        """Execute a program; `following` is what comes after it, for prefetch and eviction.

        Before each instruction `begin` is called; after each but the last one `tick`, which may
        raise to stop, unless `quiet`. What comes after a program is the caller's.
        """
        durability = Durability(
            program,
            following,
            unit=state.unit,
            keeps_activations=self._values is not None,
            lag=self._lag,
        )
        self._tier.follow(program, following, durability)
        if self._exchanges is not None:
            self._exchanges.follow(program)
        under_way: deque[_Begun] = deque()
        try:
            for position, instruction in enumerate(program):
                self._begin(instruction)
                if instruction.is_exchange:
                    while under_way:
                        self._end(under_way.popleft(), state, durability)
                    self._exchange(position, instruction, state, durability)
                    if not quiet:
                        self._tick(instruction)
                    continue
                slabs = self._tier.acquire(instruction, position)
                if self._guard.make_way(instruction):
                    self._tier.give_way(position)
                self._tier.prefetch(position)
                if self._exchanges is not None:
                    self._exchanges.begin_ahead(position)
                self._operations.ahead.expect(
                    islice(program, position + 1, None),
                    self._tier.ready,
                    beside=[begun.instruction for begun in under_way],
                )
                pair = program[position : position + 2]
                under_way.append(self._execute(position, instruction, slabs, state, pair))
                while len(under_way) > self._stays(pair):
                    done = under_way.popleft()
                    self._end(done, state, durability)
                    last = done.position == len(program) - 1
                    if not (quiet or done.instruction.goes_on or last):
                        self._tick(done.instruction)
            self._end_sending(state, durability)
        except StoppedBySignal:
            for done in under_way:
                self._end(done, state, durability)
            raise

    def _stays(self, pair: Program) -> bool:
        """Whether the first of two instructions may be under way when the second is begun."""
        if not self._operations.device.overlaps or len(pair) < 2 or not side_by_side(*pair):
            return False
        return self._operations.ahead.has_room(pair) and self._tier.has_room_beside(*pair)

    def _end(self, done: _Begun, state: StepState, durability: Durability) -> None:
        """Wait until an instruction has computed, and do what follows it."""
        instruction = done.instruction
        measured_s = self._operations.device.wait(done.mark)
        seconds = done.seconds if measured_s is None else measured_s
        if instruction.operation is Operation.UPDATE:
            state.update_s += seconds
        else:
            state.compute_s += seconds
        if isinstance(done.made, GradientNorms):
            norms = done.made.read()
            if not instruction.goes_on:
                state.ledger.norms.update(norms)
        elif done.made is not None:
            loss, *beside = done.made.reshape(-1).tolist()
            m = state.first + instruction.micro_batch
            state.ledger.losses[m], state.beside[m] = loss, beside
        self._guard.check()
        # What this instruction did counts from here on, and a kill after it must not find more
        # than one segment's work undone: so first what the visit before left has to be written.
        # Not before the instruction: what is written has the time of it.
        if done.position in durability.barriers:
            self._commits.barrier()
        if done.position in durability.visits and self._values is not None:
            self._values.wait()
        self._computed(instruction, done.slabs)
        self._weigh(instruction, done.slabs)
        self._make_durable(instruction, durability.made(done.position), done.slabs, state)
        self._tier.release(instruction)
        self._tier.write_behind(done.position)
        update = instruction.operation is Operation.UPDATE
        self._observe(state.update_step if update else state.step, instruction)

    def _execute(
        self, position: int, instruction: Instruction, slabs: Slabs, state: StepState, pair: Program
    ) -> _Begun:
        begun = time.perf_counter()
        device = self._operations.device
        with span(instruction.operation, instruction):
            made = self._compute(instruction, slabs, state, sums_stay=_sums_stay(pair))
            self._operations.forget(instruction)
            if isinstance(made, Tensor):
                made = device.bring_back(made)
        seconds = time.perf_counter() - begun
        return _Begun(position, instruction, slabs, made, seconds, device.mark())

    def _compute(
        self, instruction: Instruction, slabs: Slabs, state: StepState, *, sums_stay: bool
    ) -> Tensor | GradientNorms | None:
        """Return the loss or the norms where the instruction makes any."""
        operations, m = self._operations, instruction.micro_batch
        match instruction.operation:
            case Operation.LOAD:
                operations.load(instruction, slabs, state.load(m))
            case Operation.FORWARD:
                operations.forward(instruction, slabs, state.step, weights=state.weights)
            case Operation.TURN | Operation.BACKWARD:
                return operations.backward(
                    instruction,
                    slabs,
                    state.step,
                    sums_stay=sums_stay,
                    weights=state.weights,
                    scale=1.0 if state.ledger.scale is None else state.ledger.scale.scale,
                )
            case Operation.EVALUATE:
                return operations.evaluate(
                    instruction,
                    slabs,
                    weights=state.batch_weights[m] if state.batch_weights else None,
                )
            case Operation.STORE:
                pass  # nothing to compute: it only becomes durable
            case Operation.NORMS:
                self._check_loss(state)
                scale = state.ledger.scale
                return operations.norms(
                    instruction, slabs, state.step, None if scale is None else scale.scale
                )
            case Operation.UPDATE:
                norms = self._update(instruction, slabs, state)
                if not instruction.goes_on:
                    state.updated.add(instruction.segment)
                return norms
        return None

    def _exchange(
        self, position: int, instruction: Instruction, state: StepState, durability: Durability
    ) -> None:
        """Bring weights to all ranks, or sums to the one that owns their segment."""
        assert self._together is not None, "there are other ranks"
        assert self._exchanges is not None, "there are other ranks"
        collects = instruction.operation is Operation.COLLECT
        if collects and not state.merged:
            # All turns are done: a loss that is not finite ends all ranks with the same words.
            self._together.merge_numbers(state.ledger, state.beside, state.micro_batches)
            state.merged = True
            self._check_loss(state)
        if collects:
            self._end_sending(state, durability)
        begun = time.perf_counter()
        with span(instruction.operation, instruction):
            moving = self._exchanges.begin(position)
            stays = collects and self._exchanges.may_stay(moving)
            if not stays:
                moving.end()
        self._together.exchange.wait_s += time.perf_counter() - begun
        if stays:
            self._sending = moving
        else:
            self._end_exchange(moving, state, durability)

    def _end_sending(self, state: StepState, durability: Durability) -> None:
        if self._sending is not None:
            moving, self._sending = self._sending, None
            begun = time.perf_counter()
            moving.end()
            assert self._together is not None, "there are other ranks"
            self._together.exchange.wait_s += time.perf_counter() - begun
            self._end_exchange(moving, state, durability)

    def _end_exchange(self, moving: Moving, state: StepState, durability: Durability) -> None:
        self._operations.forget(moving.instruction)
        mark = self._operations.device.mark()
        done = _Begun(moving.position, moving.instruction, moving.slabs, None, 0.0, mark)
        self._end(done, state, durability)

    def _update(
        self, instruction: Instruction, slabs: Slabs, state: StepState
    ) -> GradientNorms | None:
        coefficient, skipped = None, 0
        if state.update_norm is None:
            self._check_loss(state)
        elif state.clip_norm is not None:
            coefficient = clip_coefficient(state.update_norm, state.clip_norm)
        if state.update_ledger is not None and state.update_ledger.scale is not None:
            if state.update_ledger.overflowed:
                return None  # what was committed before is committed again
            scale = state.update_ledger.scale
            # A power of two: as exact as if the gradients were unscaled first.
            inverse = torch.tensor(1.0 / scale.scale)
            coefficient = inverse if coefficient is None else coefficient * inverse
            skipped = scale.skipped
        return self._operations.update(
            instruction,
            slabs,
            state.update_step,
            rate=state.rate,
            coefficient=coefficient,
            skipped=skipped,
        )

    def _check_loss(self, state: StepState) -> None:
        """Refuse losses that are not finite, before anything that comes of them is kept.

        What forwards made is forgotten: it is made again of data that may have been mended.
        """
        losses = state.ledger.losses
        if math.isfinite(mean_loss(state.ledger.in_order())):
            return
        if state.ledger.scale is not None and state.ledger.scale.scale >= 1:
            return  # its gradients are not finite either: the step is skipped
        if self._values is not None:
            self._values.forget()
        bad = [str(m + 1) for m in sorted(losses) if not math.isfinite(losses[m])]
        which = f" of micro-batch {', '.join(bad)} of {len(losses)}" if bad else ""
        where = f" ({state.items(int(bad[0]) - 1)})" if bad else ""
        found = losses[int(bad[0]) - 1] if bad else math.inf
        raise NotFiniteError(
            f"step {state.step}: the loss{which} is {found}{where}; nothing of this step was kept. "
            "If its data are at fault, mend them and give the same command. If the weights are, "
            "since a step before was too long, go back to a snapshot (--from-step, where "
            "store.keep made one), or start over with --fresh, a lower optimizer.lr or "
            "optimizer.clip_norm",
            step=state.step,
        )

    @spanned("begin to write")
    def _make_durable(
        self, instruction: Instruction, made: Made, slabs: Slabs, state: StepState
    ) -> None:
        if not made.written:
            return
        operation = instruction.operation
        if operation is Operation.FORWARD:
            assert self._values is not None
            self._values.save(made.objects, slabs, state.step)
        elif operation is Operation.NORMS:
            self._commits.finish_gradient(instruction, made, slabs, state.step, state.ledger)
        else:
            ledger = state.update_ledger or state.ledger
            commits = self._commits
            write = commits.write_segment if state.unit == "step" else commits.commit_segment
            write(instruction, made, slabs, state.update_step, ledger)


def _sums_stay(pair: Program) -> bool:
    """Whether the second of two instructions goes on with what the first has summed up."""
    return (
        len(pair) == 2
        and pair[0].segment == pair[1].segment
        and pair[1].operation in (Operation.TURN, Operation.BACKWARD, Operation.UPDATE)
    )
