"""The `train` section: how long, and how a step is carried out."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from swaptrain.config.kinds import Count, Patterns, Positive, PositiveNumber, Reporters, Seed
from swaptrain.config.section import Section

__all__ = ["TrainConfig"]


class TrainConfig(Section):
    """How long, and how a step is carried out."""

    steps: Count | None = None
    """Optimizer steps; a finished run goes on when this is raised. 0: the initial weights become a
    store, to be exported or evaluated, and nothing is trained."""
    epochs: PositiveNumber | None = None
    """Instead of `steps`: how many times each item is taken; a part of an epoch counts too. The
    run records the number of steps: epochs x items / items of a step, rounded up."""
    seed: Seed = 0
    """Seed of the initial weights, the order of the data, and dropout."""
    freeze: Patterns | None = None
    """Globs of names of parameters that stay as they begin, such as `model.embed_tokens*`; `*`
    stands for anything. They have no optimizer state and are never rewritten, and the backward
    stops where nothing below learns. null: what the constructor freezes."""
    recompute: bool | None = None
    """Whether the backward recomputes what its segment's forward computed (true), or the forward
    saves it, in memory and on the disk (false, as far as there is room). null: per segment,
    whichever makes a step shorter. Never changes the result."""
    check_capture: bool | Literal["required"] = True
    """Whether two steps of the captured graph are compared with plain PyTorch before a run is
    created: losses, gradients, buffers, in float32 and within `memory.host`. Where they differ, the
    run is refused. What does not fit is compared with fewer layers (`model.hf`), or else the start
    says that it was not compared; `required` refuses the run then. false: no comparison."""
    threads: Positive | None = None
    """Intra-op threads of torch; they are part of the bits, and recorded. null: all cores."""
    loss_weighting: Literal["tokens", "micro_batches"] | None = None
    """What weighs alike in a step. tokens: every trained label (one that is not -100, counted where
    the loss reads it); micro_batches: every micro-batch, as the mean of their losses. They differ
    only where micro-batches have unequally many. null: tokens where the batch has `labels` and the
    loss a cross entropy that reads them, else micro_batches; recorded."""
    skip_ignored: bool = False
    """true: the head of a language model computes no row whose label is -100, such as those of a
    chat's questions. Fewer sums in another order: the bits are those of plain PyTorch whose forward
    leaves these rows out. Takes effect where the head is a linear layer that the loss alone reads.
    """
    report_to: Reporters = ()
    """Programs that are shown the rows of metrics.jsonl beside the run: tensorboard
    (`pip install 'swaptrain[tensorboard]'`, files in `RUN/tensorboard`) and trackio
    (`pip install 'swaptrain[trackio]'`); see docs/metrics.md. []: none."""
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits each time, so that neither an interruption nor
    a budget changes the result. Some are slower, and a model that needs an operation without one is
    refused. A CPU's kernels always do."""

    channels_last: bool = False
    """true: images and weights of convolutions lie in memory with their channels last, as
    `model.to(memory_format=torch.channels_last)` has it. Other kernels, often faster ones: the bits
    are those of plain PyTorch laid out so."""
    cudnn_benchmark: bool = False
    """On a GPU: the fastest kernels of convolutions are chosen by a trial at each start. The choice
    may differ from start to start, and with it the last bits: not with `deterministic`."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.cudnn_benchmark and self.deterministic:
            raise ValueError(
                "cudnn_benchmark chooses kernels by their speed at each start: not with "
                "deterministic"
            )
        if self.steps is None and self.epochs is None:
            raise ValueError("give steps, such as train.steps=100, or epochs")
        self._exactly_one("steps", "epochs")
        return self

    @property
    def last_step(self) -> int:
        """The number of steps; to be asked once epochs have become steps."""
        if self.steps is None:
            raise AssertionError("train.epochs have not become steps yet")
        return self.steps
