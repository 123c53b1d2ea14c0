"""The output directory as a Trainer leaves it: `checkpoint-N`, their state, the final model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swaptrain.errors import ConfigError, RunError
from swaptrain.hf.arguments import Frequency
from swaptrain.hf.history import Best, History, MetricsRow, best_of
from swaptrain.observe.metrics import read_rows
from swaptrain.store.disk.durable_files import flush_directory, write_aside
from swaptrain.store.paths import RunPaths
from swaptrain.store.slots.snapshots import list_snapshots
from swaptrain.verbs.export import export_weights

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["RUN", "Output", "check_empty"]

RUN = "swaptrain"
"""The run directory inside of the output directory."""
_STATE, _ARGUMENTS = "trainer_state.json", "training_args.json"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def check_empty(output_dir: Path) -> None:
    """Raise ConfigError where a directory has another program's output in it, and no run."""
    others = [*output_dir.glob("checkpoint-*"), *output_dir.glob("*.safetensors")]
    if others and not (output_dir / RUN).exists():
        raise ConfigError(
            f"output_dir: {output_dir} has {others[0].name} in it, and no run of swaptrain: name "
            "another directory"
        )


@dataclass(frozen=True)
class Output:
    """Writes checkpoints out of a run's snapshots, and the final model out of its last step."""

    args: TrainingArguments
    history: History
    saves: Frequency
    processing: Any
    """Its `save_pretrained` is called for each model; None: nothing beside the base's files."""
    is_adapter: bool
    note: Callable[[str], None]

    @property
    def directory(self) -> Path:
        """Where it all lies."""
        return Path(str(self.args.output_dir)).absolute()

    @property
    def run_dir(self) -> Path:
        """The run directory of swaptrain."""
        return self.directory / RUN

    def is_complete(self) -> bool:
        """Whether the final model is there."""
        state = self.directory / _STATE
        if not state.is_file():
            return False
        found = json.loads(state.read_text(encoding="utf-8"))
        return bool(found.get("global_step") == self.history.last)

    def write_due(self, done: int) -> None:
        """Write the checkpoints that are due and whose snapshots are there, up to a step."""
        if self.saves.strategy == "no":
            return
        due = done - done % self.saves.every if self.saves.strategy != "best" else done
        if due == 0 or self._checkpoint(due).exists():
            return
        newest = self._newest()  # older ones may have been deleted by save_total_limit
        for snapshot in list_snapshots(self.run_dir):
            step = snapshot.step
            is_due = self.saves.strategy == "best" or self.saves.due(step)
            if is_due and newest < step <= done and step < self.history.last:
                self._write_checkpoint(step, step, self._rows(step))

    def write_last(self, evaluation: dict[str, Any] | None) -> None:
        """Write the checkpoint of the last step and the final model, of a run that is finished.

        `evaluation`: what the held-out data says of the last step where its row has it not.
        """
        last = self.history.last
        self.write_due(last)
        rows = self._rows(last)
        if evaluation is not None:
            rows[-1] |= evaluation
        best = best_of(rows)
        is_best = self.saves.strategy == "best" and best is not None and best.step == last
        if self.saves.strategy in ("steps", "epoch") or is_best:
            self._write_checkpoint(last, None, rows)
        state = self._state(last, rows)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            source = Path(state.best_model_checkpoint)
            self.note(f"the final model is that of {source.name}")
        elif self._checkpoint(last).exists():
            source = self._checkpoint(last)
        else:
            source = self._exported(last, None)
        self._place(source)
        if source.name.startswith("."):
            shutil.rmtree(source)
        if self.args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            for other in self.directory.glob("checkpoint-*"):
                if other != Path(state.best_model_checkpoint):
                    shutil.rmtree(other, ignore_errors=True)  # as the Trainer does
        state.log_history.append(self.history.summary(rows))
        self._write_facts(self.directory, state)

    def _rows(self, last: int) -> list[dict[str, Any]]:
        rows = read_rows(RunPaths(self.run_dir).metrics)
        return [row for row in rows if row["step"] <= last]

    def _newest(self) -> int:
        """Return the step of the last checkpoint, 0 without one."""
        numbers = (path.name.rpartition("-")[2] for path in self.directory.glob("checkpoint-*"))
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    def _checkpoint(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step}"

    def _write_checkpoint(
        self, step: int, from_step: int | None, rows: Sequence[MetricsRow]
    ) -> None:
        """Write a checkpoint, whole or not at all, and delete those beyond save_total_limit."""
        from transformers.trainer_utils import rotate_checkpoints

        to = self._checkpoint(step)
        if to.exists():
            return
        aside = self._exported(step, from_step)
        state = self._state(step, rows, being_written=step)
        self._write_facts(aside, state)
        flush_directory(aside)
        aside.rename(to)
        flush_directory(self.directory)
        rotate_checkpoints(
            str(self.directory), self.args.save_total_limit, state.best_model_checkpoint
        )

    def _exported(self, step: int, from_step: int | None) -> Path:
        """Return a directory, not yet under its name, with the model of a step."""
        aside = self.directory / f".checkpoint-{step}"
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        form: Any = "adapter" if self.is_adapter else "all"
        export_weights(
            self.run_dir, aside, None, form=form, from_step=from_step, note=lambda _: None
        )
        if self.processing is not None:
            self.processing.save_pretrained(aside)
        return aside

    def _state(self, step: int, rows: Sequence[MetricsRow], being_written: int = 0) -> Any:
        """Return transformers' TrainerState after a step."""
        from transformers import TrainerState

        args, shape, best = self.args, self.history.shape, best_of(rows)
        state = TrainerState(
            epoch=shape.epoch_of(step),
            global_step=step,
            max_steps=self.history.last,
            train_batch_size=shape.batch,
            num_train_epochs=-(-self.history.last // shape.steps),
            log_history=self.history.entries(rows),
        )
        state.compute_steps(args, self.history.last)
        if best is not None and args.metric_for_best_model is not None:
            self._add_best(state, best, being_written)
        return state

    def _add_best(self, state: Any, best: Best, being_written: int) -> None:
        state.best_metric = best.loss
        if self.saves.strategy != "no":
            state.best_global_step = best.step
        checkpoint = self._checkpoint(best.step)
        if checkpoint.exists() or being_written == best.step:
            state.best_model_checkpoint = str(checkpoint)

    def _write_facts(self, directory: Path, state: Any) -> None:
        arguments = self.args.to_json_string()  # which hides tokens
        write_aside(directory / _ARGUMENTS, (arguments + "\n").encode())
        content = json.dumps(asdict(state), indent=2, sort_keys=True)
        write_aside(directory / _STATE, (content + "\n").encode())

    def _place(self, source: Path) -> None:
        """Let the output directory have the files of a model; weights as links where it can."""
        names = [p.relative_to(source) for p in sorted(source.rglob("*")) if p.is_file()]
        chosen = [name for name in names if name.name not in (_STATE, _ARGUMENTS)]
        try:
            for name in chosen:
                to = self.directory / name
                to.parent.mkdir(exist_ok=True)
                beside = to.with_name(f".{to.name}.partial")
                beside.unlink(missing_ok=True)
                try:
                    os.link(source / name, beside)
                except OSError:  # a file system without links
                    shutil.copyfile(source / name, beside)
                beside.replace(to)
            for pattern in _WEIGHTS:
                for old in self.directory.glob(pattern):
                    if old.relative_to(self.directory) not in chosen:
                        old.unlink()
            flush_directory(self.directory)
        except OSError as error:
            raise RunError(
                f"cannot write {error.filename or self.directory}: {error.strerror}: make room, "
                "and make the same call again"
            ) from error
