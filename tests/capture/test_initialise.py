"""A recorded construction gives the plain constructor's model, bit for bit, without its weights."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.initialise import Construction, construct
from swaptrain.errors import CaptureError

Factory = Callable[[], nn.Module]
SEED = 11


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in dtype, shape, strides and every bit (NaN equals the same NaN)."""
    if (first.dtype, first.shape, first.stride()) != (second.dtype, second.shape, second.stride()):
        return False
    return (
        first.detach().numpy(force=True).tobytes() == second.numpy(force=True).tobytes()
        if (first.dtype is not torch.bfloat16)
        else torch.equal(first.detach().view(torch.int16), second.detach().view(torch.int16))
    )


def states() -> tuple[bytes, object, bytes]:
    numpy_state = np.random.get_state(legacy=False)["state"]["key"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state.tobytes()


def constructed(
    factory: Factory, scratch_dir: Path, fake_from_bytes: int = 16 << 10
) -> Construction:
    """Construct `factory` both ways and check all that has to be equal."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    plain = factory()
    plain_states = states()
    built = construct(factory, seed=SEED, scratch_dir=scratch_dir, fake_from_bytes=fake_from_bytes)
    assert states() == plain_states
    assert built.recorded == (built.refusal is None)

    expected = dict(plain.named_parameters(remove_duplicate=False))
    parameters = dict(built.module.named_parameters(remove_duplicate=False))
    assert list(parameters) == list(expected)
    assert [n for n, _ in built.module.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    for name in reversed(expected):
        fake = parameters[name]
        assert isinstance(fake, FakeTensor) and isinstance(fake, nn.Parameter), name
        assert fake.fake_mode is built.fake_mode and fake.device.type == "cpu", name
        assert (fake.shape, fake.stride(), fake.dtype, fake.requires_grad) == (
            expected[name].shape,
            expected[name].stride(),
            expected[name].dtype,
            expected[name].requires_grad,
        ), name
        value = built.value(name)
        assert type(value) is torch.Tensor and not value.requires_grad
        assert same_bits(expected[name], value), name
    buffers = dict(built.module.named_buffers())
    assert list(buffers) == [name for name, _ in plain.named_buffers()]
    for name, buffer in plain.named_buffers():
        assert type(buffers[name]) is type(buffer), name
        assert same_bits(buffer, buffers[name]), name
    assert [(n, type(m).__name__) for n, m in built.module.named_modules()] == [
        (n, type(m).__name__) for n, m in plain.named_modules()
    ]
    assert states() == plain_states
    return built


def initialised(initialise: Callable[[torch.Tensor], object], *shape: int) -> Factory:
    def factory() -> nn.Module:
        layer = nn.Linear(*shape)
        initialise(layer.weight)
        return nn.Sequential(layer, nn.Linear(70, 70))

    return factory


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(300, 64, padding_idx=3), nn.Linear(64, 300, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.no_decay = True  # type: ignore[assignment]
    return model


def tied_small() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.no_decay = True  # type: ignore[assignment]
    return model


def frozen_views() -> nn.Module:
    model = nn.Module()
    base = torch.randn(256, 256)
    model.first = nn.Parameter(base[:100].t(), requires_grad=False)
    model.second = nn.Parameter(base[100:])
    model.register_buffer("start", base[:2, :2])
    model.register_buffer("mask", torch.tril(torch.ones(200, 200, dtype=torch.bool)))
    return model


def convolution() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    return model.to(memory_format=torch.channels_last)


def data_assigned() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.data = torch.randn(100, 100)
    model.late = nn.Parameter(torch.empty(0), requires_grad=False)
    model.late.data = torch.randn(100, 100)
    model.shrunk = nn.Parameter(torch.randn(100, 100))
    model.shrunk.data = torch.ones(3)
    return model


def draws_elsewhere() -> nn.Module:
    model = nn.Sequential(nn.Linear(80, 80))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model.append(nn.Linear(80, 80))
    generator = torch.Generator().manual_seed(9)
    nn.init.normal_(model[0].weight, generator=generator)
    nn.init.uniform_(model[1].weight[:7], generator=generator)
    model.append(nn.Linear(80, 80))
    with torch.no_grad():
        model[2].bias.fill_(random.random() + float(np.random.rand()))
        model[2].weight.mul_(torch.bernoulli(torch.full((80, 80), 0.5)))
    torch.manual_seed(5)
    return model.append(nn.Linear(80, 80))


def looks_at_values() -> nn.Module:
    model = nn.Linear(100, 100)
    with torch.no_grad():
        model.weight.div_(model.weight.norm().item())
        if bool((model.weight > 0).all()):
            model.weight.zero_()
        for row in range(20):
            model.weight[row] = row / 7 + float(model.weight[row, 0])
        model.weight[torch.tensor([1, 5]), :3] = 0
        model.bias.copy_(model.weight.sum(dim=1))
        model.scale = model.weight[0].tolist()
    return model


def many_reads() -> nn.Module:
    model = linear_pair()
    with torch.no_grad():
        for row in range(60):
            model[0].weight[row] = float(model[0].weight[row - 1].sum())
    return model


def deep_copies() -> nn.Module:
    layer = nn.Linear(100, 100)
    layer.register_buffer("mask", torch.ones(100, 100).tril())
    layer.register_buffer("lower", layer.mask[50:])
    return nn.ModuleList([layer, copy.deepcopy(layer), copy.deepcopy(layer)])


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(100, 90))
    other = nn.utils.parametrizations.weight_norm(nn.Linear(100, 90))
    return nn.Sequential(layer, other, nn.utils.parametrizations.orthogonal(nn.Linear(80, 80)))


def old_spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(100, 90)), nn.utils.spectral_norm(nn.Linear(4, 4))
    )


def linear_pair() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 90), nn.Linear(90, 3))


PLAIN: dict[str, Factory] = {
    "linear": linear_pair,
    "half": lambda: linear_pair().half(),
    "bfloat16": lambda: linear_pair().to(torch.bfloat16),
    "float64 and back": lambda: linear_pair().double().float(),
    "convolution": convolution,
    "lstm": lambda: nn.LSTM(64, 64, num_layers=2, bidirectional=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128), 2, enable_nested_tensor=False
    ),
    "tied": tied,
    "tied small": tied_small,
    "views": frozen_views,
    "orthogonal": initialised(nn.init.orthogonal_, 100, 70),
    "truncated normal": initialised(nn.init.trunc_normal_, 100, 70),
    "sparse": initialised(lambda weight: nn.init.sparse_(weight, 0.3), 100, 70),
    "kaiming": initialised(nn.init.kaiming_normal_, 100, 70),
    "data assigned": data_assigned,
    "draws elsewhere": draws_elsewhere,
    "looks at values": looks_at_values,
    "many reads": many_reads,
    "deep copies": deep_copies,
    "parametrizations": spectral,
    "old spectral norm": old_spectral,
}


@pytest.mark.parametrize("name", PLAIN)
def test_recorded_modules_equal_the_plain_constructor(name: str, tmp_path: Path) -> None:
    """Parameters, buffers, strides, flags and generators are those of the plain constructor."""
    assert constructed(PLAIN[name], tmp_path).refusal is None


def writes_through_numpy() -> nn.Module:
    model = linear_pair()
    model[0].weight.data.numpy()[:5] = 1
    return model


def swallows_the_refusal() -> nn.Module:
    model = linear_pair()
    try:
        model[0].weight.data.numpy()[:5] = 1
    except Exception:
        nn.init.zeros_(model[0].weight)
    return model


def runs_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64))
    model(torch.randn(4, 16, 8, 8))
    return model


def lazy_with_a_forward() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(90), nn.Linear(90, 90))
    with torch.no_grad():
        model(torch.randn(2, 100))
    return model


def large_lazy_with_views() -> nn.Module:
    model = lazy_with_a_forward()
    big = nn.Linear(600, 1000)
    model.append(big)
    model.register_buffer("window", big.weight.detach()[3:400])
    model.register_buffer("rows", torch.arange(300_000.0))
    return model


def resized_storage() -> nn.Module:
    model = linear_pair()
    model[0].weight.untyped_storage().resize_(100 * 90 * 4 + 64)
    return model


def outside_memory() -> nn.Module:
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.from_numpy(np.arange(17e6, dtype=np.float32)))
    model.copied = nn.Parameter(torch.ones(17_000_000))
    with torch.no_grad():
        model.copied.copy_(model.table)
    return model


REFUSED: dict[str, Factory] = {
    "numpy write": writes_through_numpy,
    "swallowed refusal": swallows_the_refusal,
    "batch norm forward": runs_batch_norm,
    "lazy": lazy_with_a_forward,
    "large lazy": large_lazy_with_views,
    "resized": resized_storage,
    "outside memory": outside_memory,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_modules_are_built_eagerly_and_say_why(name: str, tmp_path: Path) -> None:
    """What a recording cannot repeat is equal all the same, and never silently so."""
    built = constructed(REFUSED[name], tmp_path)
    assert not built.recorded and built.refusal
    assert built.largest_value_bytes() == 0
    assert list(tmp_path.iterdir()) == []


def from_transformers(auto: str, config: str, dtype: torch.dtype, **fields: object) -> Factory:
    def factory() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        made = getattr(transformers, config)(**fields)
        if auto == "T5ForConditionalGeneration":
            return transformers.T5ForConditionalGeneration(made).to(dtype)
        return getattr(transformers, auto).from_config(made, dtype=dtype)

    return factory


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
CAUSAL = "AutoModelForCausalLM"
ARCHITECTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": (CAUSAL, "LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "llama tied": (CAUSAL, "LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": (CAUSAL, "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}),
    "mixtral": (
        CAUSAL,
        "MixtralConfig",
        {**SMALL, "num_local_experts": 4, "num_key_value_heads": 2},
    ),
    "mamba": (CAUSAL, "MambaConfig", {**SMALL, "state_size": 16}),
    "bert": ("AutoModelForMaskedLM", "BertConfig", dict(SMALL)),
    "vit": (
        "AutoModelForImageClassification",
        "ViTConfig",
        {**SMALL, "image_size": 32, "patch_size": 8},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 64,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 256,
            "d_kv": 16,
        },
    ),
    "neox": (CAUSAL, "GPTNeoXConfig", {**SMALL, "rotary_pct": 0.25}),
    "gemma2": (CAUSAL, "Gemma2Config", {**SMALL, "head_dim": 16, "num_key_value_heads": 2}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ARCHITECTURES]
    + [(name, torch.bfloat16) for name in ("llama tied", "mixtral", "mamba", "t5")],
)
def test_transformers_models_are_recorded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Architectures of transformers are recorded as they are, in float32 and in bfloat16."""
    auto, config, fields = ARCHITECTURES[name]
    built = constructed(from_transformers(auto, config, dtype, **fields), tmp_path)
    assert built.refusal is None
    assert not [
        m for m in built.module.modules() if isinstance(vars(m).get("inv_freq"), FakeTensor)
    ]


def test_tied_parameters_stay_one_object(tmp_path: Path) -> None:
    """A parameter under two names is one fake object with its attributes, large or small."""
    for factory in (tied, tied_small):
        built = construct(factory, seed=SEED, scratch_dir=tmp_path)
        assert built.module[0].weight is built.module[1].weight  # type: ignore[index]
        assert built.module[0].weight.no_decay is True  # type: ignore[index]
        assert torch.equal(built.value("0.weight"), built.value("1.weight"))


def test_values_are_fresh_and_can_be_forgotten(tmp_path: Path) -> None:
    """Changing a value changes nothing later; after `forget` there are none."""
    for factory in (linear_pair, lazy_with_a_forward):
        built = construct(factory, seed=SEED, scratch_dir=tmp_path)
        first = built.value("1.weight")
        kept = first.clone()
        first.zero_()
        assert torch.equal(built.value("1.weight"), kept)
        with built.fake_mode:
            inside = built.value("1.weight")
        assert type(inside) is torch.Tensor and torch.equal(inside, kept)
        with pytest.raises(KeyError):
            built.value("2.weight")
        built.forget()
        with pytest.raises(RuntimeError, match="forgotten"):
            built.value("1.weight")


def test_nothing_global_stays_changed(tmp_path: Path) -> None:
    """Default dtype, swap_tensors and modes are as before, whether recording worked or not."""

    def changes_default() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return runs_batch_norm().append(linear_pair())  # type: ignore[operator]
        finally:
            torch.set_default_dtype(torch.float32)

    swap = torch.utils.swap_tensors
    assert constructed(changes_default, tmp_path).refusal
    assert torch.utils.swap_tensors is swap
    assert torch.get_default_dtype() is torch.float32
    assert type(torch.ones(100, 100)) is torch.Tensor


def test_errors_of_the_factory_are_its_own(tmp_path: Path) -> None:
    """What a factory raises comes out unchanged, and an uninitialised parameter is named."""

    def broken() -> nn.Module:
        torch.ones(100, 100) @ torch.ones(3)
        return linear_pair()

    with pytest.raises(RuntimeError, match="size mismatch"):
        construct(broken, seed=SEED, scratch_dir=tmp_path)
    with pytest.raises(CaptureError, match=r"0\.weight.*forward"):
        construct(lambda: nn.Sequential(nn.LazyLinear(3)), seed=SEED, scratch_dir=tmp_path)


def test_only_parameters_are_fake(tmp_path: Path) -> None:
    """Tensors that the factory leaves elsewhere are real; views of parameters stay views."""
    elsewhere: list[torch.Tensor] = []

    def factory() -> nn.Module:
        model = linear_pair()
        model.start = model[0].weight.detach().clone()
        model.table = {"rows": torch.randn(100, 100)[5:]}
        model.view = model[0].weight.data
        model.small_view = model[1].bias.data
        elsewhere[:] = [torch.randn(100, 100)]
        return model

    built = construct(factory, seed=SEED, scratch_dir=tmp_path)
    made_elsewhere = elsewhere[0]
    torch.manual_seed(SEED)
    plain = factory()
    assert same_bits(plain.start, built.module.start)  # type: ignore[arg-type]
    assert same_bits(plain.table["rows"], built.module.table["rows"])  # type: ignore[index]
    assert same_bits(elsewhere[0], made_elsewhere)
    for view, parameter in (
        (built.module.view, built.module[0].weight),  # type: ignore[index]
        (built.module.small_view, built.module[1].bias),  # type: ignore[index]
    ):
        assert isinstance(view, FakeTensor)
        assert view.untyped_storage()._cdata == parameter.untyped_storage()._cdata


def test_the_module_computes_under_its_fake_mode(tmp_path: Path) -> None:
    """A forward and backward in the fake mode give gradients shaped like the parameters."""
    for factory in (lambda: nn.LSTM(64, 64), lambda: nn.LSTM(8, 8)):
        built = construct(factory, seed=SEED, scratch_dir=tmp_path)
        width = built.module.input_size
        with built.fake_mode:
            output, _ = built.module(torch.zeros(5, 2, width))  # type: ignore[arg-type]
            output.sum().backward()
        for parameter in built.module.parameters():
            assert isinstance(parameter.grad, FakeTensor)
            assert parameter.grad.shape == parameter.shape


Tensors = list[torch.Tensor]
SIDE = 6
STEPS: dict[str, Callable[[Tensors, torch.Tensor, torch.Tensor], object]] = {
    "randn": lambda pool, a, b: pool.append(torch.randn(SIDE, SIDE)),
    "arange": lambda pool, a, b: pool.append(torch.arange(36.0).view(SIDE, SIDE)),
    "empty": lambda pool, a, b: pool.append(torch.empty(SIDE, SIDE).uniform_()),
    "like": lambda pool, a, b: pool.append(torch.rand_like(a)),
    "rows": lambda pool, a, b: a[1:4].normal_(),
    "transposed": lambda pool, a, b: pool.append(a.t()),
    "column": lambda pool, a, b: a[:, 2].copy_(b[1].clone()),
    "own transpose": lambda pool, a, b: a.copy_(a.t().clone()),
    "copy": lambda pool, a, b: a.copy_(b.clone()),
    "scale": lambda pool, a, b: a.mul_(0.5),
    "clone": lambda pool, a, b: pool.append(a.clone()),
    "product": lambda pool, a, b: pool.append(a @ b),
    "sum": lambda pool, a, b: pool.append(a + b.t()),
    "add": lambda pool, a, b: a[2:, :2].add_(b[0, 0].clone()),
    "fill": lambda pool, a, b: a.t().fill_(3.0),
    "zero": lambda pool, a, b: a[::2].zero_(),
    "item": lambda pool, a, b: a.add_(b[3, 3].item()),
    "branch": lambda pool, a, b: a.zero_() if bool(b.sum() > 0) else b.normal_(),
    "dropout": lambda pool, a, b: pool.append(nn.functional.dropout(a, 0.3)),
    "draw by value": lambda pool, a, b: pool.append(torch.normal(a, 1.0)),
    "seed": lambda pool, a, b: torch.manual_seed(len(pool)),
    "data": lambda pool, a, b: setattr(a, "data", b.clone()),
    "move": lambda pool, a, b: a.t_(),
    "deepcopy": lambda pool, a, b: pool.append(copy.deepcopy(a)),
}


@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 50), st.integers(0, 50)),
        max_size=25,
    ),
    fake_from_bytes=st.sampled_from([1, SIDE * SIDE * 4 + 1]),
)
def test_any_sequence_of_operations_is_replayed_exactly(
    steps: list[tuple[str, int, int]],
    fake_from_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Views, partial writes, draws and looks in any order end in the plain constructor's bits."""

    def factory() -> nn.Module:
        pool = [torch.randn(SIDE, SIDE), torch.zeros(SIDE, SIDE)]
        for name, first, second in steps:
            STEPS[name](pool, pool[first % len(pool)], pool[second % len(pool)])
        model = nn.Module()
        for position, tensor in enumerate(pool):
            if position % 3 == 2:
                model.register_buffer(f"buffer{position}", tensor)
            else:
                model.register_parameter(f"parameter{position}", nn.Parameter(tensor))
        return model

    built = constructed(factory, tmp_path_factory.getbasetemp(), fake_from_bytes)
    assert built.refusal is None


_MEASURE = """
import ctypes, pathlib, re, sys
ctypes.CDLL(None).mallopt(-3, 1 << 20)
import torch
from torch import nn
from swaptrain.capture.initialise import construct
eager = sys.argv[2] == "eager"
def build(width, depth):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    if eager:
        model[0].weight.data.numpy()[0] = 1
    return model
def peak_kib():
    # ru_maxrss would begin with the peak of the process that started this one.
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
def run(width, depth):
    built = construct(
        lambda: build(width, depth),
        seed=0,
        scratch_dir=pathlib.Path(sys.argv[1]),
        resident_bytes=48 << 20,
    )
    assert built.recorded != eager
    for name, _ in built.module.named_parameters():
        built.value(name)
run(64, 2)
before = peak_kib()
run(2048, 12)
print(peak_kib() - before)
"""


@pytest.mark.parametrize(("mode", "allowed_bytes"), [("recorded", 40 << 20), ("eager", 110 << 20)])
def test_peak_memory_is_far_below_the_weights(
    mode: str, allowed_bytes: int, tmp_path: Path
) -> None:
    """192 MiB of weights in 16 MiB parameters are constructed and read in a fraction of that."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), mode],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert int(done.stdout) * 1024 < allowed_bytes
