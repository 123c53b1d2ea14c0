"""The `model` section: what is trained, and in which dtypes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from swaptrain.config.kinds import EntryPoint, HfModel, Patterns, Text, Weights
from swaptrain.config.section import Section
from swaptrain.program.quantized import QuantizedAs

__all__ = ["ModelConfig"]


class ModelConfig(Section):
    """What is trained: exactly one of `hf` and `python`."""

    hf: HfModel | None = None
    """A directory with a Hugging Face `config.json`, the name of a model that the hub's local cache
    holds (`org/name`), or the config itself as a mapping with `model_type`. The run begins from the
    weights beside it (`model.safetensors`, or the files that `model.safetensors.index.json` names);
    where there are none, and for a mapping, from the architecture's own initialisation."""
    python: EntryPoint | None = None
    """`package.module:factory`, a function that returns an `nn.Module` whose `forward(**batch)`
    returns the loss: a scalar tensor, the first or the only scalar of a tuple, `loss` of a dict or
    of an object."""
    architecture: Text | None = None
    """A class of transformers, such as `BertForMaskedLM`, for `hf`. null: the one that the config's
    `architectures` name, or else that fits the data; where none or several do, they are listed."""
    resize_to_tokenizer: bool = False
    """true: where `data.tokenizer` has more tokens than the model of `hf`, its embeddings and head
    grow to as many rows, as transformers' `resize_token_embeddings` grows them."""
    kwargs: dict[str, Any] = {}
    """Arguments of the `python` factory."""
    weights: Weights | None = None
    """Weights that a model of `python` begins from: a file of safetensors, the index of several, a
    directory with either, or a name of the hub's local cache (`timm/...`). They are read tensor by
    tensor. The names are those of the module, or of one module inside of it. null: the run begins
    from what the factory makes."""
    weights_except: Patterns | None = None
    """Globs of names that are not taken from `weights`: what the module has of them begins as the
    factory makes it, such as a head for other classes. Anything else that `weights` lack, have
    beyond the module, or have in another shape is refused. null: none."""
    constants: dict[str, Any] = {}
    """Arguments of every forward that are no tensors, such as `{return_loss: true}` for CLIP."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What is computed in. With bfloat16 and float16 an exact float32 master of each weight is
    kept, and of the data's floating tensors only those are cast that a parameter's operation reads
    first. float16 scales the loss as torch's GradScaler does, and skips steps that overflow: for
    GPUs that have no bfloat16."""
    master: Literal["float32", "none"] = "float32"
    """What is kept of a bfloat16 weight beside it. float32: the rest of an exact float32 master.
    none: nothing, and each update rounds the weight by chance: 2 bytes a parameter of disk less,
    and another promise: see docs/optimizers.md."""
    base: QuantizedAs | None = None
    """How frozen weights lie on the disk and in RAM: int8 (a byte a weight, a scale a row) or nf4
    (half a byte a weight, a scale for each 64). They are decoded to `dtype` once a visit of a
    segment, and the run trains on what is left of them. The output head, embedding tables, tied
    weights and vectors stay as they are. null: as `dtype`."""
    base_except: Patterns | None = None
    """Globs of names of frozen weights that stay as `dtype` all the same."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        self._exactly_one("hf", "python")
        if self.kwargs and self.python is None:
            raise ValueError("kwargs belong to python; write the arguments of hf into its config")
        if self.weights is not None and self.python is None:
            raise ValueError("weights belong to python; those of hf lie beside its config.json")
        if self.weights_except is not None and self.weights is None:
            raise ValueError("weights_except belongs to weights, which is not set")
        if self.architecture is not None and self.hf is None:
            raise ValueError("architecture belongs to hf: it names a class of transformers")
        if self.resize_to_tokenizer and self.hf is None:
            raise ValueError("resize_to_tokenizer belongs to hf: a function makes its own table")
        if self.master == "none" and self.dtype != "bfloat16":
            raise ValueError("master: none belongs to dtype: bfloat16, whose weights it rounds")
        if self.base_except is not None and self.base is None:
            raise ValueError("base_except belongs to base: int8 or nf4")
        return self
