"""Trains in several forked processes, as torchrun would start them, and says how each one ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swaptrain.capture.forward.loss import loss_of
from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.errors import SwaptrainError
from swaptrain.planning import prepare
from swaptrain.planning.prepare import Prepared
from tests.support.captures import Captures
from tests.support.forking import fork
from tests.support.machines import MACHINE
from tests.support.serving import Server

__all__ = ["ACTIONS", "Ended", "ddp", "together"]

_MOST_S = 400
"""After which a rank that has not ended is killed, and the test fails."""


class Ended:
    """How the ranks ended."""

    def __init__(self, report: dict[str, Any]) -> None:
        assert "wrong" not in report, report["wrong"]
        self.codes: list[int] = report["codes"]
        """Exit codes by rank; -9 for one that was killed."""
        self.said: list[str] = report["said"]
        """What each wrote to its standard output and error."""
        self.counts: list[int | None] = report["counts"]
        """Calls that changed the disk, by rank, where they were counted."""


def together(
    server: Server,
    config: Config | list[Path],
    count: int,
    *,
    arguments: tuple[str, ...] = (),
    **options: Any,
) -> Ended:
    """Train as `count` ranks, with one config for all or one each.

    `kill` maps a rank to the number of the call to the disk in which it dies, `counts` asks for
    these numbers; `signals` maps a rank to [signal, file, lines]: it gets it when the file has so
    many lines; `hang` is a rank and after how many exchanges it does nothing any more, and
    `end_hung` that rank, killed when another one has ended; `free_bytes` is what every disk has
    free; with `agent` the ranks' store is in a process of its own, as under torchrun; with `little`
    slabs have so many times what the largest instruction needs, and
    with `late` the device has memory of its own, whose copies come late.
    """
    paths = config if isinstance(config, list) else [config.run.dir.with_suffix(".yaml")] * count
    plan = {"paths": [str(path) for path in paths], "arguments": arguments, **options}
    return Ended(server.ask("tests.support.ranks", do="together", **plan))


def ddp(server: Server, config: Config, count: int, to: Path) -> dict[str, Tensor]:
    """Return the weights of the same run by torch's DistributedDataParallel."""
    plan = {"paths": [str(config.run.dir.with_suffix(".yaml"))] * count, "ddp": str(to)}
    ended = Ended(server.ask("tests.support.ranks", do="together", **plan))
    assert ended.codes == [0] * count, ended.said
    found: dict[str, Tensor] = torch.load(to, weights_only=True)
    return found


def _train_ddp(plan: dict[str, Any], rank: int) -> int:
    """Train by torch's own means; rank 0 writes the weights."""
    import torch.distributed as dist

    from swaptrain.data import open_data
    from swaptrain.generators import seed_generators
    from swaptrain.models.build import model_factory

    config = load_config(Path(plan["paths"][rank]))
    dist.init_process_group("gloo")
    seed_generators(config.train.seed)
    torch.set_num_threads(1)
    factory = model_factory(config)
    folder = config.run.dir.with_name(f"ddp-{rank}")
    data = open_data(config.data, seed=0, run_dir=folder, model_vocabulary=factory.vocabulary)
    model = nn.parallel.DistributedDataParallel(factory.make())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, weight_decay=0.1, fused=True)
    each = config.data.micro_batches // dist.get_world_size()
    for step in range(1, config.train.last_step + 1):
        for m in range(each):
            batch = data.batch(step, rank * each + m)
            with model.no_sync() if m + 1 < each else nullcontext():
                (loss_of(model(**batch), model.module, batch.keys()) / each).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not rank:
        torch.save({n: p.detach() for n, p in model.module.named_parameters()}, plan["ddp"])
    dist.barrier()
    return 0


_CAPTURES = Captures()


def _capture(path: Path) -> None:
    """Capture the model of a config here, once for all ranks and for all runs of the session."""
    prepare.build = _CAPTURES.build
    with suppress(SwaptrainError, OSError):
        config = load_config(path).resolved()
        elsewhere = config.run.model_copy(update={"dir": path.with_name("captured")})
        Prepared(config.model_copy(update={"run": elsewhere}), None, lambda _: None)


def _together(plan: dict[str, Any]) -> dict[str, Any]:
    _capture(Path(plan["paths"][0]))
    count = len(plan["paths"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(plan["paths"][0]).parent
    logs = [folder / f"said-{rank}" for rank in range(count)]
    children = [_child(plan, rank, port, logs[rank]) for rank in range(count)]
    store = _agent_store(port) if plan.get("agent") else None
    codes: list[int | None] = [None] * count
    waiting = {int(rank): order for rank, order in plan.get("signals", {}).items()}
    begun = time.monotonic()
    late = False
    while None in codes:
        for rank, pid in enumerate(children):
            if codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if found else None
        for rank, (number, file, lines) in list(waiting.items()):
            path = Path(file)
            if path.exists() and path.read_bytes().count(b"\n") >= lines:
                os.kill(children[rank], number)
                del waiting[rank]
        if time.monotonic() - begun > plan.get("most_s", _MOST_S):
            late = True
            for rank, pid in enumerate(children):
                if codes[rank] is None:
                    os.kill(pid, signal.SIGKILL)
            begun = time.monotonic()
        hung = plan.get("end_hung")
        if hung is not None and codes[hung] is None and codes[1 - hung] is not None:
            os.kill(children[hung], signal.SIGKILL)  # as torchrun does when another rank has ended
        time.sleep(0.01)
    del store
    said = [path.read_text(errors="replace") for path in logs]
    counted = [folder / f"count-{rank}" for rank in range(count)]
    counts = [int(path.read_text()) if path.exists() else None for path in counted]
    report = {"codes": codes, "said": said, "counts": counts}
    return report | ({"wrong": f"a rank did not end: {report}"} if late else {})


def _agent_store(port: int) -> Any:
    """Return the store that torchrun has in its own process, which outlives all ranks."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def _child(plan: dict[str, Any], rank: int, port: int, log: Path) -> int:
    pid = fork()
    if pid:
        return pid
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin.close()
        count = len(plan["paths"])
        each = plan.get("each", count)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if plan.get("agent"):
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        killer = _prepare(plan, rank)
        if "ddp" in plan:
            code = _train_ddp(plan, rank)
            return pid
        code = main(["--config", plan["paths"][rank], *plan["arguments"]])
        if killer is not None:
            (log.parent / f"count-{rank}").write_text(str(killer.count))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(plan: dict[str, Any], rank: int) -> Any:
    """Let a rank die, or hang, where it is told to."""
    hang = plan.get("hang")
    if hang is not None and hang[0] == rank:
        from swaptrain.ranks.exchange import Exchange

        begin, left = Exchange.begin, [hang[1]]

        def late(self: Exchange, *given: Any) -> Any:
            left[0] -= 1
            while left[0] < 0:
                time.sleep(1)
            return begin(self, *given)

        Exchange.begin = late  # type: ignore[method-assign]
    if plan.get("late"):
        from swaptrain.compute.copy_streams import StreamDevice
        from swaptrain.planning import prepare
        from tests.support.streams import LateStreams

        late = LateStreams(limit_bytes=1 << 30)
        prepare.open_device = lambda *_: StreamDevice(late)
    if "little" in plan:
        from swaptrain.run.steps.training import Training

        run = Training.run

        def with_little(training: Training) -> None:
            training.pool.shrink(int(plan["little"] * training.plan.peaks.instruction_bytes))
            run(training)

        Training.run = with_little  # type: ignore[method-assign]
    if "free_bytes" in plan:
        from swaptrain.planning.budgets import disk_budget

        disk_budget.free_bytes = lambda _: plan["free_bytes"]
    kill = plan.get("kill", {}).get(str(rank))
    if not plan.get("kill") and not plan.get("counts"):
        return None
    from swaptrain.planning import roofline
    from tests.support import killing

    # A start that measures makes calls that a later one, which finds the figures, does not make.
    roofline.machine = lambda *_: MACHINE
    return killing.Killer(kill)


ACTIONS = {"together": _together}
