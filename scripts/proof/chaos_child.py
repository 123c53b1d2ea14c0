"""The processes that scripts/proof/chaos.py kills: they train for real and note where they are.

    python scripts/proof/chaos_child.py train CONFIG LOG   one run of the command, in this process
    python scripts/proof/chaos_child.py serve CONFIG LOG   captures once, forks a run per request

The log has a line for each instruction that is begun (`b`) and completed (`e`), with the time in
seconds; each is written to the page cache by one system call, so that a killed process loses none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for the models and data of tests.support

import torch  # noqa: E402

import swaptrain.verbs.evaluate as evaluation  # noqa: E402
import swaptrain.verbs.train as training  # noqa: E402
from swaptrain.config.load import load_config  # noqa: E402
from swaptrain.config.schema import Config  # noqa: E402
from swaptrain.planning.prepare import Prepared  # noqa: E402
from swaptrain.program.instructions import Instruction, Operation  # noqa: E402
from swaptrain.run.signals import StopRequest  # noqa: E402
from swaptrain.run.steps.executor import Executor  # noqa: E402
from swaptrain.run.steps.training import Training  # noqa: E402


class Log:
    """Notes what this process does; nothing of it changes what is done."""

    def __init__(self, path: Path, evaluations: int = 0, delay_s: float = 0.0) -> None:
        """With `evaluations` this process kills itself, `delay_s` after the begin of so many."""
        self._evaluations, self._delay_s = evaluations, delay_s
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._now = ""
        self.write("process")

    def write(self, line: str) -> None:
        os.write(self._file, f"{line} {time.monotonic():.3f}\n".encode())

    def install(self) -> None:
        """Follow the executor, and say when the store is open and when the run is at its end."""
        execute, initialise, finish = Executor._execute, Executor.__init__, training.finish

        def executed(
            executor: Executor, position: int, instruction: Instruction, slabs: Any, state: Any,
            pair: Any,
        ) -> Any:  # fmt: skip
            update = instruction.operation is Operation.UPDATE
            step = state.update_step if update else state.step
            name = instruction.operation.value
            self._now = f"{step} {name} {instruction.segment} {instruction.micro_batch}"
            self.write(f"b {self._now}")
            self._evaluations -= name == "evaluate"
            if name == "evaluate" and self._evaluations == 0:
                threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return execute(executor, position, instruction, slabs, state, pair)

        def initialised(executor: Executor, *arguments: Any, observe: Any, **named: Any) -> None:
            def observed(step: int, instruction: Instruction) -> None:
                self.write(f"e {self._now}")
                observe(step, instruction)

            self.write("open")
            initialise(executor, *arguments, observe=observed, **named)

        def finished(run: Training, stop: StopRequest) -> None:
            self.write("finish")
            finish(run, stop)

        Executor._execute = executed  # type: ignore[method-assign]
        Executor.__init__ = initialised  # type: ignore[method-assign]
        training.finish = evaluation.finish = finished


class Server:
    """Captures a model once and forks processes that open the run, and train or evaluate it."""

    def __init__(self, config: Config, log: Path) -> None:
        self._config, self._log = config, log
        self._prepared = Prepared(config.resolved(), None, lambda _: None)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Fork a process and kill it after `kill_after_s`, if that is given and it still runs.

        With `evaluations` it kills itself so long after the begin of so many instructions.
        """
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(self._carry_out(request))
        descriptor = os.pidfd_open(child)
        delay_s = None if request["evaluations"] else request["kill_after_s"]
        ended, _, _ = select.select([descriptor], [], [], delay_s)
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
        return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begun}

    def _carry_out(self, request: dict[str, Any]) -> int:
        log = Log(self._log, request["evaluations"], request["kill_after_s"] or 0.0)
        log.install()
        prepared = self._prepared
        pool_bytes = int(prepared.plan.peaks.instruction_bytes * request["pool"])
        prepared.plan = dataclasses.replace(prepared.plan, pool_bytes=pool_bytes)
        training.Prepared = evaluation.Prepared = lambda *_: prepared  # type: ignore[assignment,misc]

        def evaluate() -> None:
            found = evaluation.evaluate_run(self._config)
            log.write(f"loss {found.step} {found.found.loss!r}")

        verbs = {"train": lambda: training.train(self._config), "eval": evaluate}
        return _exit_code(verbs[request["verb"]])


def _exit_code(run: Callable[[], None]) -> int:
    try:
        run()
    except BaseException as error:
        traceback.print_exception(error)
        return int(getattr(error, "exit_code", 99))
    return 0


def main() -> None:
    """Train, or answer each line of the standard input, a request, with a line."""
    what, config_path, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what == "train":
        from swaptrain.cli import main as command

        Log(log).install()
        command(["--config", str(config_path)])
        return
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a run prints goes to the standard error
    server = Server(load_config(config_path), log)
    os.write(answers, b"{}\n")
    for line in sys.stdin:
        os.write(answers, json.dumps(server.run(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
