"""Random cut models without torch, and the sizes of their objects."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from swaptrain.program.evaluation import EvaluationSpec, value_prefix
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.program.model import (
    BufferSpec,
    ModelSpec,
    ParameterSpec,
    SegmentSpec,
    ValueSpec,
)
from swaptrain.program.roles import role_of
from swaptrain.program.state_arrays import segment_arrays
from swaptrain.program.step import StepBuilder
from swaptrain.program.tensors import TensorSpec

__all__ = ["builders", "chain", "chain_size", "evaluating", "models", "size_of", "tensor"]


def tensor(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorSpec(name, shape, tuple(reversed(strides)), dtype)


def segment(index: int, **fields: tuple[str, ...]) -> SegmentSpec:
    empty: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("owns", "parameters", "buffers", "inputs", "outputs"), ()
    )
    return SegmentSpec(
        index=index, isomorphism=0, activation_bytes=0, flops=0, module="-", **{**empty, **fields}
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Draw a model: long skips, tied and frozen parameters, mutated buffers, values without
    gradients, segments that own nothing, or below which nothing learns; the last one learns.

    What is trained is reached: a value has a gradient where its segment learns."""
    count = draw(st.integers(1, 5))
    parameters: dict[str, ParameterSpec] = {}
    buffers: dict[str, BufferSpec] = {}
    owned: dict[int, list[str]] = {}
    reads: dict[int, list[str]] = {}
    for k in range(1, count + 1):
        owned[k] = [f"p{k}.{i}" for i in range(draw(st.integers(0, 2)))]
        for name in owned[k]:
            dtype = draw(st.sampled_from(["bfloat16", "float32"]))
            parameters[name] = ParameterSpec(
                tensor(name, 4, dtype=dtype), "float32", draw(st.booleans())
            )
        earlier = [name for j in range(1, k) for name in owned[j]]
        reads[k] = owned[k] + (draw(st.lists(st.sampled_from(earlier), unique=True, max_size=2))
                               if earlier else [])  # fmt: skip
        if draw(st.booleans()):
            buffers[f"b{k}"] = BufferSpec(tensor(f"b{k}", 2))
    values: dict[str, ValueSpec] = {}
    for producer in range(count):
        name = f"v{producer}" if producer else "batch.x"
        later = draw(st.lists(st.integers(producer + 1, count), unique=True, max_size=3))
        readers = tuple(sorted({producer + 1, *later}))
        below = [v for v in values.values() if producer in v.readers]
        trained = [parameters[name].trainable for name in reads.get(producer, [])]
        gradient = any([*trained, *(v.gradient for v in below)])
        values[name] = ValueSpec(tensor(name, 3), producer, readers, gradient)
        if producer and draw(st.booleans()):  # whole numbers, such as positions
            readers = tuple(sorted({producer + 1, *later}))
            values[f"i{producer}"] = ValueSpec(tensor(f"i{producer}", 3), producer, readers, False)
    if not any(v.gradient and count in v.readers for v in values.values()):
        name = f"p{count}.last"
        parameters[name] = ParameterSpec(tensor(name, 4), "float32", True)
        owned[count].append(name)
        reads[count].append(name)
    values["loss"] = ValueSpec(tensor("loss"), count, (), True)
    segments = tuple(
        segment(
            k,
            owns=tuple(owned[k]),
            parameters=tuple(reads[k]),
            buffers=(f"b{k}",) if f"b{k}" in buffers else (),
            inputs=tuple(name for name, v in values.items() if k in v.readers),
            outputs=tuple(name for name, v in values.items() if v.producer == k),
        )
        for k in range(1, count + 1)
    )
    return ModelSpec(parameters, buffers, values, segments, "loss", "-")


@st.composite
def builders(draw: st.DrawFn, *, deferred: bool | None = None) -> StepBuilder:
    """Draw a model with a number of micro-batches and the kind of update."""
    model = draw(models())
    micro_batches = draw(st.integers(1, 5))
    arrays = {s.index: list(segment_arrays(model, s, "bfloat16", moments)) for s in model.segments}
    return StepBuilder(
        model,
        "bfloat16",
        arrays,
        micro_batches,
        draw(st.booleans()) if deferred is None else deferred,
        {
            k: draw(st.integers(1, 3))
            for k, names in arrays.items()
            if any(role_of(name).is_for_updates for name in names)
        },
    )


def evaluating(builder: StepBuilder) -> StepBuilder:
    """Return the builder with two graphs of an evaluation that read what the segments read."""
    model, graphs = builder.model, []
    for number, batches in enumerate((builder.micro_batches, 1)):
        prefix = value_prefix(number)
        values = {
            prefix + name: replace(v, tensor=tensor(prefix + name, 3), gradient=False)
            for name, v in model.values.items()
        }
        slices = tuple(
            replace(
                s,
                owns=(),
                inputs=tuple(prefix + name for name in s.inputs),
                outputs=tuple(prefix + name for name in s.outputs),
            )
            for s in model.segments
        )
        graphs.append(EvaluationSpec(number, batches, slices, values, prefix + model.loss))
    return replace(builder, evaluations=tuple(graphs))


def moments(parameter: TensorSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    return dict.fromkeys(("exp_avg", "exp_avg_sq"), (parameter.shape, "float32"))


def chain(segments: int, micro_batches: int, *, elements: int = 1000) -> StepBuilder:
    """Return a chain of equal segments with split masters and one value between neighbours."""
    parameters = {
        f"p{k}": ParameterSpec(tensor(f"p{k}", elements, dtype="bfloat16"), "float32", True)
        for k in range(1, segments + 1)
    }
    names = ["batch.x", *(f"v{k}" for k in range(1, segments + 1))]
    values = {
        name: ValueSpec(tensor(name, 1), k, (k + 1,) if k < segments else (), k > 0)
        for k, name in enumerate(names)
    }
    specs = tuple(
        segment(
            k,
            owns=(f"p{k}",),
            parameters=(f"p{k}",),
            inputs=(names[k - 1],),
            outputs=(names[k],),
        )
        for k in range(1, segments + 1)
    )
    model = ModelSpec(parameters, {}, values, specs, names[-1], "-")
    arrays = {k: ["weights", "remainder", "exp_avg", "exp_avg_sq"] for k in range(1, segments + 1)}
    return StepBuilder(model, "bfloat16", arrays, micro_batches, False)


def chain_size(parameter_count: int, value_bytes: int) -> dict[tuple[Kind, str], int]:
    """Return the bytes of a chain's objects, by kind and by name for state."""
    return {
        (Kind.STATE, "weights"): 2 * parameter_count,
        (Kind.STATE, "remainder"): 2 * parameter_count,
        (Kind.STATE, "exp_avg"): 4 * parameter_count,
        (Kind.STATE, "exp_avg_sq"): 4 * parameter_count,
        (Kind.ACCUMULATOR, ""): 4 * parameter_count,
        (Kind.VALUE, ""): value_bytes,
        (Kind.GRADIENT, ""): value_bytes,
    }


def size_of(sizes: dict[tuple[Kind, str], int], key: ObjectKey) -> int:
    """Look an object's size up."""
    return sizes[key.kind, key.name if key.kind is Kind.STATE else ""]
