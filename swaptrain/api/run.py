"""A run as a script has it: what it has done, and what can be taken out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swaptrain.api.objects import HandedOver, use_data
from swaptrain.api.progress import progress_of
from swaptrain.api.settings import configured
from swaptrain.api.surroundings import restored
from swaptrain.api.written_data import written
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.given import handed_over
from swaptrain.observe.eval_result import EvalResult
from swaptrain.store.paths import RunPaths

__all__ = ["Run"]


class Run:
    """One run directory. Nothing of it is in memory: each method reads what it needs.

    `model` code that only the script has is known to a run that `train` returned, or that
    `swaptrain.open(dir, model=...)` was given.
    """

    def __init__(
        self, config: Config, given: HandedOver, *, is_own: bool = True, held_out: Any = None
    ) -> None:
        """Take the config; `is_own`: it is the script's, and not only what the directory says.

        `held_out` is what `evaluate` takes where it is given no data.
        """
        # The script may go to another directory meanwhile.
        run = config.run.model_copy(update={"dir": config.run.dir.absolute()})
        self._config = config.model_copy(update={"run": run})
        self._given, self._is_own, self._held_out = given, is_own, held_out

    def __repr__(self) -> str:
        """Return where it lies and how far it is."""
        return f"<swaptrain run {self.dir}, step {self.step}>"

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self._config.run.dir

    @property
    def config(self) -> dict[str, Any]:
        """The config as nested values, with every default."""
        return self._config.to_tree()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one a step (docs/metrics.md)."""
        from swaptrain.observe.metrics import read_rows

        return read_rows(RunPaths(self.dir).metrics)

    @property
    def step(self) -> int:
        """The last step that metrics.jsonl has; 0 before the first."""
        rows = self.metrics
        return int(rows[-1]["step"]) if rows else 0

    def weights(self, step: int | None = None, dtype: str | None = None) -> Iterator[Any]:
        """Yield (name, tensor) of each parameter and buffer, one at a time.

        Of the last step, or of a snapshot; floating ones in `dtype` where that is given. Raises
        DamagedStoreError, RunError where the run stands inside a step.
        """
        import numpy as np
        import torch

        from swaptrain.verbs.stored_step import with_step

        stored = with_step(self.dir, step, lambda view: view, _silent, "read its weights")
        for tensor in stored.tensors(dtype):
            pieces = [np.asarray(piece).reshape(-1) for piece in tensor.pieces]
            flat = np.concatenate(pieces) if pieces else np.empty(0)
            if tensor.dtype == "bfloat16":
                value = torch.from_numpy(flat.view(np.int16).copy()).view(torch.bfloat16)
            else:
                value = torch.from_numpy(flat.copy())
            yield tensor.name, value.reshape(tensor.shape)

    def load_into(self, module: Any, step: int | None = None) -> None:
        """Copy the weights into a module that exists, tensor by tensor, by their names.

        Raises ConfigError where a name or a shape is another one; what came before it is copied.
        """
        import torch

        own = {**dict(module.named_parameters(remove_duplicate=False)), **module.state_dict()}
        missing = set(module.state_dict())
        wide = any(t.dtype == torch.float32 for t in module.parameters())
        with torch.no_grad():
            for name, value in self.weights(step, "float32" if wide else None):
                target = own.get(name)
                if target is None or target.shape != value.shape:
                    found = "none" if target is None else str(tuple(target.shape))
                    raise ConfigError(
                        f"{type(module).__name__} has {found} where the run has {name} of "
                        f"{tuple(value.shape)}: give a module of the run's model"
                    )
                target.copy_(value)
                missing -= {n for n, t in own.items() if t.data_ptr() == target.data_ptr()}
        if missing := {n for n in missing if n in dict(module.named_parameters())}:
            raise ConfigError(
                f"the run has no {', '.join(sorted(missing)[:4])}: give a module of its model"
            )

    def export(
        self,
        to: str | Path,
        *,
        adapter: bool = False,
        merged: bool = False,
        dtype: str | None = None,
        step: int | None = None,
    ) -> Path:
        """Write the weights as `python -m swaptrain export` does; return the path.

        To FILE.safetensors, or to a directory as the hub has it; with `adapter` as PEFT does.
        """
        from swaptrain.verbs.export import export_weights

        form: Any = "adapter" if adapter else "merged" if merged else "all"
        with restored(), handed_over(self._given.functions):
            export_weights(self.dir, Path(to), dtype, form=form, from_step=step, note=_silent)
        return Path(to)

    def evaluate(
        self,
        data: Any = None,
        *,
        step: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> EvalResult:
        """Return what held-out data says of a step: loss, perplexity, and other numbers.

        `data` is whatever `train` takes for `eval`, whole; without it, the run's own.
        """
        from swaptrain.verbs.evaluate import evaluate_run

        given = HandedOver(dict(self._given.keys), dict(self._given.functions))
        config = self._config
        data = self._held_out if data is None else data
        with TemporaryDirectory(prefix="swaptrain-eval-") as folder:
            if data is not None:
                for key in [key for key in given.keys if key.startswith("eval.")]:
                    del given.keys[key]
                tree = self.config
                none = dict.fromkeys(("text", "chat", "tokens", "python"))
                kept = {**(tree["eval"] or {"every": 1}), **none, "kwargs": {}, "batches": "all"}
                tree["eval"], tree["data"]["held_out"] = kept, None
                use_data(
                    given,
                    data,
                    "eval",
                    Path(folder),
                    tokenizer=str(config.data.tokenizer),
                    collates=config.data.collate is not None,
                )
                config = configured(tree, {}, given.keys)
            if overrides:
                config = configured(config.to_tree(), overrides, {})
            self._check_code(config, ("model", "data", "eval"), given)
            files = [*self._given.files, *given.files]
            with restored(), handed_over(given.functions), written(files):
                quiet = partial(progress_of, config.memory.host, quiet=True)
                return evaluate_run(config, step, _silent, quiet).found

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        chat: bool = False,
        step: int | None = None,
    ) -> Any:
        """Return what the model writes after a prompt, or a list of it for several prompts.

        The likeliest token each time, or drawn where a temperature, `top_p` or `top_k` is given.
        """
        from swaptrain.generate import Prompt, Sampling
        from swaptrain.verbs.generate import generate_text

        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
        self._check_code(self._config, ("model",), self._given)
        with restored(), handed_over(self._given.functions):
            found = generate_text(
                self._config,
                [Prompt(text) for text in prompts],
                sampling,
                is_chat=chat,
                from_step=step,
            )
        return found.texts[0] if isinstance(prompt, str) else found.texts

    def _check_code(self, config: Config, sections: Sequence[str], given: HandedOver) -> None:
        if not self._is_own:
            from swaptrain.verbs.recorded_code import refuse_code

            cure = "hand it over, as swaptrain.open(dir, model=..., data=...)"
            refuse_code(config, self.dir, sections, given=given.keys, cure=cure)


def _silent(_: str) -> None:
    """Nobody is to be told."""
