"""Which modules are recorded, with the plain constructor's bits, and which are built eagerly."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.capture.init.constructing import (
    Factory,
    constructed,
    lazy_with_a_forward,
    linear_pair,
    runs_batch_norm,
    tied,
    tied_small,
)
from tests.support.matrix import every


def initialised(initialise: Callable[[torch.Tensor], object], *shape: int) -> Factory:
    def factory() -> nn.Module:
        layer = nn.Linear(*shape)
        initialise(layer.weight)
        return nn.Sequential(layer, nn.Linear(70, 70))

    return factory


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


@pytest.mark.parametrize("name", every(2, PLAIN))
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
    except Exception:  # a factory that hides every error from whoever records it
        nn.init.zeros_(model[0].weight)
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
    assert {built.value_bytes(name) for name in dict(built.module.named_parameters())} == {0}
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
    every(
        4,
        [(name, torch.float32) for name in ARCHITECTURES]
        + [(name, torch.bfloat16) for name in ("llama tied", "mixtral", "mamba", "t5")],
    ),
)
def test_transformers_models_are_recorded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Architectures of transformers are recorded as they are, in float32 and in bfloat16."""
    auto, config, fields = ARCHITECTURES[name]
    built = constructed(from_transformers(auto, config, dtype, **fields), tmp_path)
    assert built.refusal is None
    assert not [
        m for m in built.module.modules() if isinstance(vars(m).get("inv_freq"), FakeTensor)
    ]
