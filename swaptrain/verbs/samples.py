"""`eval.samples`: how a run continues a few prompts after its evaluations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.generate import Prompt, PromptCodec, Sampling
from swaptrain.generate.generation import check_generates
from swaptrain.observe.metrics import MetricsFile
from swaptrain.store.paths import RunPaths
from swaptrain.units import format_size
from swaptrain.verbs.generate import check_prompts, generated
from swaptrain.verbs.stored_step import StoredStep, live_store

__all__ = ["Samples"]

_SHOWN = 200
"""Most characters of a text in a run's notes."""


class Samples:
    """Writes texts to RUN/samples.jsonl, one line a step, and their beginnings to the notes.

    In a conversation's run a prompt is a message of the user, where there is a chat template.
    Raises ConfigError where the model of the run writes no text, or a prompt is wrong.
    """

    def __init__(self, config: Config, module: torch.nn.Module, note: Callable[[str], None]):
        assert config.eval is not None
        self._config, self._note = config, note
        self._prompts = [Prompt(text) for text in config.eval.samples or ()]
        self._sampling = Sampling(max_new_tokens=config.eval.sample_tokens)
        check_generates(module)
        self._codec = PromptCodec(config)
        if config.data.chat is not None and self._codec.has_template:
            self._codec = PromptCodec(config, is_chat=True)
        check_prompts(module, self._codec, self._prompts, self._sampling, "sample_tokens")
        self._works = True

    def __call__(self, step: int, free_bytes: int) -> None:
        """Write those of `step`, after which the store is whole, in so much memory.

        Where the budget is too small for that, a note says so once.
        """
        if not self._works:
            return
        config, run = self._config, self._config.run.dir
        budget = config.memory.model_copy(update={"host": free_bytes})
        store = live_store(run)
        with torch.random.fork_rng():
            try:
                found = generated(
                    config.model_copy(update={"memory": budget}),
                    store.root,
                    StoredStep(step, store),
                    self._codec,
                    self._prompts,
                    self._sampling,
                    None,
                    lambda _: None,
                )
            except ConfigError as error:
                self._works = False
                self._note(f"no samples in {format_size(free_bytes)} of memory.host: {error}")
                return
        rows = [
            {"prompt": prompt.shown(), "text": text}
            for prompt, text in zip(self._prompts, found.texts, strict=True)
        ]
        with MetricsFile(RunPaths(run).samples) as file:
            file.cut_after(step - 1)  # of a step that is done again
            file.append({"step": step, "samples": rows})
        for row in rows:
            text = row["text"]
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            self._note(f"step {step}: {row['prompt']!r} -> {shown!r}")
