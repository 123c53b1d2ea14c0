"""The processes that train together, connected by torch.distributed: gloo, on host memory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from swaptrain.errors import ConfigError, RunError, SwaptrainError
from swaptrain.ranks.last_words import LastWords, shortened
from swaptrain.ranks.launch import Launch
from swaptrain.ranks.meeting import Attempt, meet
from swaptrain.spans import span
from swaptrain.units import format_duration

__all__ = ["Group"]

_MOMENT_S = 2.0


class Group:
    """All ranks of a run, from one of them. What is said here is said by all, in the same order.

    Every wait ends within the timeout: where a process has died or the network does not answer,
    RunError says so, with the last words of who failed first; ConfigError where these refuse the
    input.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        """Connect to the others. Raises RunError where they do not come within the timeout."""
        self.ranks, self.local_count = launch.ranks, launch.local_count
        rank = launch.ranks.rank
        self._beside = range(rank - launch.local_rank, rank)
        """Ranks of this machine that come before this one."""
        self._timeout_s = timeout_s
        self._words: LastWords | None = None
        self.has_heard = False
        """Whether this rank ends since another one has ended."""
        self._open = False
        timeout = timedelta(seconds=timeout_s)
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch does not export it by name
        with self._waiting("connecting"):
            found = next(iter(rendezvous("env://", timeout=timeout)))
            self._kept: Any = prefixed("swaptrain", found[0])
            self.starts = int(self._kept.add(f"starts/{rank}", 1))
            """Of this rank under the same torchrun, as far as its store goes back."""
            self.attempt: Attempt = meet(self._kept, self.ranks, timeout_s)
            store = prefixed(self.attempt.name, self._kept)
            self._words = LastWords(store, rank)
            dist.init_process_group(
                "gloo",
                store=prefixed("group", store),
                rank=self.ranks.rank,
                world_size=self.ranks.count,
                timeout=timeout,
            )
            # Of their own, since a share may be begun before its turn and numbers are not: each
            # group has its own order.
            self._weights: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._sums: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._open = True

    def close(self) -> None:
        """Let go of the others; doing it twice does no harm."""
        if self._open:
            self._open = False
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def say_last(self, words: str, *, refuses: bool = False) -> None:
        """Leave the reason for the end of this rank, for those that wait for it.

        `refuses`: the input is not right, and the others end as this one does.
        """
        if self._words is not None:
            self._words.leave(words, refuses=refuses)

    def is_said(self, words: str) -> bool:
        """Whether a rank before this one, on this machine, ends with the same words in a moment."""
        until = time.monotonic() + _MOMENT_S
        while self._beside and self._words is not None:
            said = self._words.of(self._beside)
            if shortened(words) in [of.text for of in said.values()]:
                return True
            if len(said) == len(self._beside) or time.monotonic() > until:
                break
            time.sleep(_MOMENT_S / 20)
        return False

    def keep(self, mark: str) -> None:
        """Leave a mark for the attempts that torchrun makes after this one."""
        with self._waiting("leaving a mark"):
            self._kept.set(f"kept/{mark}", "")

    def is_kept(self, mark: str) -> bool:
        """Whether an attempt of the same torchrun has left a mark, as far as its store is kept."""
        with self._waiting("looking for a mark"):
            return bool(self._kept.check([f"kept/{mark}"]))

    def gather(self, said: Any) -> list[Any]:
        """Return what each rank says, a value of JSON, in the order of the ranks."""
        own = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        sizes = self.gather_floats([own.numel()])
        longest = int(max(size[0] for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.ranks.count)]
        with self._waiting("comparing"):
            dist.all_gather(found, padded)
        texts = (
            bytes(one[: int(size[0])].tolist()) for one, size in zip(found, sizes, strict=True)
        )
        return [json.loads(text) for text in texts]

    def gather_floats(self, own: Sequence[float]) -> list[list[float]]:
        """Return as many numbers of each rank, in float64, in the order of the ranks."""
        given = torch.tensor(list(own), dtype=torch.float64)
        found = [torch.empty_like(given) for _ in range(self.ranks.count)]
        with self._waiting("exchanging numbers"):
            dist.all_gather(found, given)
        return [one.tolist() for one in found]

    def largest(self, number: float) -> float:
        """Return the largest of the numbers that the ranks give."""
        return max(one[0] for one in self.gather_floats([number]))

    def merge(self, own: dict[int, float], count: int) -> dict[int, float]:
        """Return the numbers that the ranks have together, by their places below `count`.

        No two ranks have the same place. Those that no rank has are left out.
        """
        places = [own.get(place, math.nan) for place in range(count)]
        given = [1.0 if place in own else 0.0 for place in range(count)]
        merged: dict[int, float] = {}
        for row in self.gather_floats([*places, *given]):
            merged.update({p: row[p] for p in range(count) if row[count + p]})
        return merged

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.gather_floats([0.0])

    def broadcast(self, tensor: Tensor, root: int) -> Callable[[], None]:
        """Begin to bring all ranks what `root` has in its tensor; return what waits for it."""
        with self._waiting("sharing weights"):
            work = dist.broadcast(tensor, root, group=self._weights, async_op=True)
        return self._end(work, "sharing weights")

    def send(self, tensor: Tensor, to: int, tag: int) -> Callable[[], None]:
        """Begin to send a tensor to a rank; return what waits until it may change."""
        with self._waiting("sending sums"):
            work = dist.isend(tensor, to, group=self._sums, tag=tag)
        return self._end(work, "sending sums")

    def receive(self, tensor: Tensor, of: int, tag: int) -> Callable[[], None]:
        """Begin to receive a tensor of a rank; return what waits until it is there."""
        with self._waiting("collecting sums"):
            work = dist.irecv(tensor, of, group=self._sums, tag=tag)
        return self._end(work, "collecting sums")

    def _end(self, work: Any, what: str) -> Callable[[], None]:
        def wait() -> None:
            with self._waiting(what):
                work.wait(timedelta(seconds=self._timeout_s))

        return wait

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Turn what torch reports while it waits for other ranks into one line."""
        try:
            with span("wait for ranks", what):
                yield
        except RuntimeError as error:
            raise self._reason(what, error) from None

    def _reason(self, what: str, error: RuntimeError) -> SwaptrainError:
        rank = self.ranks.rank
        others = [other for other in range(self.ranks.count) if other != rank]
        said = {} if self._words is None else self._words.of(others)
        if said:
            other, words = next(iter(said.items()))
            text = f"rank {rank} ends, since rank {other} has ended: {words.text}"
            found: SwaptrainError = ConfigError(text) if words.refuses else RunError(text)
            found.is_echo = other in self._beside  # which has said it to the same terminal
            self.has_heard = True
            return found
        detail = str(error).strip().splitlines()[0][:300] if str(error).strip() else "no detail"
        return RunError(
            f"rank {rank} waited for the others ({what}), and one has died, or the network did not "
            f"answer within {format_duration(self._timeout_s)} (distributed.timeout): run the same "
            f"command to go on ({detail})"
        )
