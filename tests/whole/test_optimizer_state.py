"""`optimizer.state`: moments in 8 bits or bfloat16, with the bits of plain PyTorch that does so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.planning.prepare import Prepared
from swaptrain.store.read.live_store import look
from swaptrain.units import format_size, format_wear
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.plan import plan
from swaptrain.verbs.plans.table import figures
from tests.support.matrix import proof_but
from tests.support.runs import (
    assert_same_bits,
    assert_same_state,
    config_of,
    losses,
    reference,
    step_write_bytes,
    trained,
    weights,
)

pytestmark = pytest.mark.trains

MODEL = {"python": "tests.support.models:gpt", "kwargs": {"layers": 2}}
BASE: dict[str, Any] = {
    "model": MODEL,  # its MLPs have matrices of 4,096 elements, which are coded
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "32KiB"},
    "train": {"steps": 4},
}
PARTS = {"memory": {"segment": "200KiB"}, "store": {"chunk": "8KiB"}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2},
    "adamw-clipped": {"name": "adamw", "lr": 1e-2, "amsgrad": True, "clip_norm": 0.3},
    "momentum": {"name": "sgd", "lr": 1e-1, "momentum": 0.9},
    "adagrad": {"name": "adagrad", "lr": 1e-2},
    "rmsprop": {"name": "rmsprop", "lr": 1e-3, "momentum": 0.9},
    "nadam": {"name": "nadam", "lr": 1e-3},
    "adamax": {"name": "adamax", "lr": 1e-3},
    "rprop": {"name": "rprop", "lr": 1e-4},
}
CASES = [
    (state, dtype, optimizer, shape)
    for state in ("8bit", "bfloat16")
    for dtype in ("float32", "bfloat16")
    for optimizer in OPTIMIZERS
    for shape in ("segments", "parts", "trees")
]
DEFAULT = [
    ("8bit", "bfloat16", "adamw", "parts"),
    ("bfloat16", "float32", "adamw-clipped", "segments"),
]
PROOF = [
    ("8bit", "float32", "adamw-clipped", "parts"),
    ("8bit", "float32", "nadam", "parts"),
    ("8bit", "bfloat16", "momentum", "trees"),
    ("bfloat16", "bfloat16", "adamw", "parts"),
]


def job(to: Path, state: str, dtype: str, optimizer: str, shape: str) -> Config:
    """Return a config whose segments are small, or one that is updated in parts."""
    tree: dict[str, Any] = {**BASE, **(PARTS if shape == "parts" else {})}
    if shape == "trees":
        tree = {**tree, "store": {"commit": {"every": 2}}}
    chosen = {**OPTIMIZERS[optimizer], "state": state}
    return config_of(to, {**tree, "model": {**MODEL, "dtype": dtype}, "optimizer": chosen})


@pytest.mark.parametrize(
    ("state", "dtype", "optimizer", "shape"),
    proof_but(CASES, *DEFAULT, whole=[case for case in CASES if case not in PROOF + DEFAULT]),
)
def test_the_bits_are_those_of_plain_pytorch(
    tmp_path: Path, state: str, dtype: str, optimizer: str, shape: str
) -> None:
    """That encodes and decodes the state behind each step; of every optimizer, with any cut."""
    config = job(tmp_path / "a", state, dtype, optimizer, shape)
    run = trained(config)
    plain = reference(config)
    assert losses(run) == plain.losses
    assert_same_state(weights(run), plain)
    tree = {name: config.to_tree()[name] for name in ("model", "data", "memory", "train")}
    exact = reference(config_of(tmp_path / "b", {**tree, "optimizer": OPTIMIZERS[optimizer]}))
    assert exact.losses[:2] == plain.losses[:2], "the first update reads no state"
    differs = [n for n, p in plain.parameters.items() if not torch.equal(p, exact.parameters[n])]
    assert "blocks.0.mlp.1.weight" in differs


def test_parts_are_what_it_says(tmp_path: Path) -> None:
    """An update in parts: what is coded is divided, scales and small moments are whole."""
    config = job(tmp_path / "a", "8bit", "bfloat16", "adamw", "parts")
    layouts = Prepared(config, None, lambda _: None).plan.layouts
    assert layouts.parts and layouts.undivided.keys() == layouts.parts.keys()
    for k in layouts.parts:
        arrays = {array.name: array for array in layouts.state[k].arrays}
        whole = {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"}
        assert layouts.undivided[k].arrays == whole & arrays.keys()
        codes, rest = arrays["exp_avg_8bit"], arrays["remainder"]
        assert codes.dtype == "uint8" and codes.chunks == rest.chunks > 1
        assert {e.tensor.name: e.offset for e in codes.entries}.items() <= {
            e.tensor.name: e.offset for e in rest.entries
        }.items()
        for part in range(codes.chunks):
            assert all(entry.start % 256 == 0 for entry in codes.part(part, 1).entries)


@pytest.mark.parametrize(("state", "nbytes"), [("float32", 12), ("bfloat16", 8), ("8bit", 6)])
def test_bytes_of_disk(tmp_path: Path, state: str, nbytes: int) -> None:
    """6.03 bytes a parameter, 8, 12: what lies in the slots, but for small tensors and pages."""
    layouts = Prepared(
        config_of(
            tmp_path / "a",
            {
                **BASE,
                "model": {"python": "tests.support.models:gpt", "dtype": "bfloat16",
                          "kwargs": {"layers": 2, "width": 256}},
                "memory": {"segment": "4MiB"},
                "optimizer": {"name": "adamw", "state": state},
            },
        ),
        None,
        lambda _: None,
    ).plan.layouts  # fmt: skip
    elements = sum(p.tensor.numel for p in layouts.model.parameters.values())
    stored = sum(layout.nbytes for layout in layouts.state.values())
    assert nbytes * elements < stored < 1.05 * nbytes * elements


@pytest.mark.parametrize("state", proof_but(["8bit", "bfloat16"], whole=["bfloat16"]))
def test_a_run_goes_on_with_it_and_with_no_other(tmp_path: Path, state: str) -> None:
    """The draws are those of the step; the export has the state, decoded."""
    whole = trained(job(tmp_path / state, state, "bfloat16", "adamw", "segments"))
    half = job(tmp_path / f"{state}-2", state, "bfloat16", "adamw", "segments")
    for steps in (2, 4):
        train = half.train.model_copy(update={"steps": steps})
        run = trained(half.model_copy(update={"train": train}))
    assert_same_bits(weights(run), weights(whole))
    to = tmp_path / f"{state}.safetensors"
    export_weights(run, to, None, state=True)
    found = load_file(to)
    moments = {n for n in found if n.startswith("optimizer.") and n.endswith("exp_avg_sq")}
    assert len(moments) == len([n for n in found if not n.startswith("optimizer.")])
    large = found["optimizer.blocks.0.mlp.1.weight.exp_avg_sq"]
    assert large.shape == (128, 32) and bool((large >= 0).all()) and bool((large > 0).any())
    assert large.dtype == (torch.float32 if state == "8bit" else torch.bfloat16)
    assert not any("8bit" in n or "scale" in n.rpartition(".")[2] for n in moments)
    other = half.optimizer.model_copy(update={"state": "float32"})
    with pytest.raises(ConfigError, match=r"optimizer\.state: .* -> float32"):
        trained(half.model_copy(update={"optimizer": other}))


LAYOUTS: dict[str, dict[str, Any]] = {
    "transposed": {
        "model": {"python": "tests.support.models:wide_mlp", "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:vectors"},
        "memory": {"segment": "24KiB"},
    },
    "channels last": {
        "model": {"python": "tests.whole.test_channels_last:Network"},
        "data": {"python": "tests.support.datasets:image_labels"},
        "memory": {"segment": "16KiB"},
        "train": {"steps": 3, "channels_last": True},
    },
}


@pytest.mark.parametrize("state", ["8bit", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_exported_state_is_that_of_plain_pytorch(tmp_path: Path, name: str, state: str) -> None:
    """Codes and scales lie in the order of memory, a file in that of the dimensions."""
    tree = {"train": {"steps": 3}, **LAYOUTS[name], "optimizer": {"name": "adamw", "state": state}}
    config = config_of(tmp_path / "a", tree)
    plain = reference(config)
    coded = [value for value in plain.state.values() if value.numel() >= 4096]
    assert any(not value.is_contiguous() for value in coded)
    export_weights(trained(config), to := tmp_path / "w.safetensors", None, state=True)
    found = {n: v for n, v in load_file(to).items() if n.startswith("optimizer.")}
    assert int(found.pop("optimizer.step")) == 3
    held = {n: v.float() for n, v in found.items() if v.ndim}
    assert_same_bits(held, {f"optimizer.{n}": v for n, v in plain.state.items()})


@pytest.mark.parametrize(
    ("state", "master", "nbytes"),
    proof_but(
        [("float32", "float32", 12), ("bfloat16", "float32", 8), ("8bit", "float32", 6),
         ("8bit", "none", 4)],
        ("8bit", "none", 4),
    ),
)  # fmt: skip
def test_the_wear_is_what_steps_write(tmp_path: Path, state: str, master: str, nbytes: int) -> None:
    """By `plan`, before a byte is written: so many bytes a parameter, and some of hand-offs."""
    tree = {
        **BASE,
        "model": {"python": "tests.support.models:gpt", "dtype": "bfloat16", "master": master,
                  "kwargs": {"layers": 2, "width": 256}},
        "memory": {"segment": "4MiB"},
        "train": {"steps": 4, "recompute": True},
        "optimizer": {"name": "adamw", "state": state},
    }  # fmt: skip
    config = config_of(tmp_path / "a", tree)
    report = plan(config)
    said = dict(figures(report, config, 10**12))["wear"]
    written = step_write_bytes(trained(config))
    assert written == pytest.approx(report.step_write_bytes, rel=0.1)
    for found in (written, report.step_write_bytes):
        assert nbytes < found / report.parameters < nbytes + 1.5
    assert said.startswith(f"{format_size(report.step_write_bytes)} written a step, ")
    assert f"{format_wear(4 * report.step_write_bytes)} to come" in said
    assert said.endswith(f"which is {10**12 // report.step_write_bytes:,} steps")


def test_arrays_on_the_disk_are_codes(tmp_path: Path) -> None:
    """By their zarr.json; a person who looks finds what is meant."""
    run = trained(job(tmp_path / "a", "8bit", "float32", "adamw", "segments"))
    store = look(run)
    assert store is not None
    names = {
        path.parent.name: yaml.safe_load(path.read_text())["data_type"]
        for segment in store.segments
        if segment.state is not None
        for path in segment.state.path.glob("*/zarr.json")
    }
    assert names["exp_avg_8bit"] == "uint8" and names["exp_avg_sq_scale"] == "float32"


class KeptInFloat32(nn.Module):
    """A matrix that stays float32 beside others: it is coded and has no remainder."""

    _keep_in_fp32_modules = ("gate",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 96)
        self.gate, self.up = nn.Linear(96, 96), nn.Linear(96, 96)
        self.head = nn.Linear(96, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.up(x) * self.gate(x.float()).to(x.dtype)
        logits: Tensor = self.head(x).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("state", ["8bit", "bfloat16"])
def test_parts_of_a_segment_with_another_dtype(tmp_path: Path, state: str) -> None:
    """What is whole there, the remainder too, is taken by pieces."""
    tree = {
        **BASE,
        "model": {"python": "tests.whole.test_optimizer_state:KeptInFloat32", "dtype": "bfloat16"},
        "memory": {"segment": "1MiB"},
        "store": {"chunk": "8KiB"},
        "optimizer": {"name": "adamw", "lr": 1e-2, "state": state},
    }
    config = config_of(tmp_path / "a", tree)
    layouts = Prepared(config, None, lambda _: None).plan.layouts
    assert any("remainder" in whole.arrays for whole in layouts.undivided.values())
    run = trained(config)
    plain = reference(config)
    assert losses(run) == plain.losses
    assert_same_state(weights(run), plain)


def test_an_optimizer_that_needs_whole_parameters_is_refused(tmp_path: Path) -> None:
    for optimizer, said in (
        ({"name": "adafactor"}, r"optimizer\.state: 8bit .* Adafactor does not"),
        ({"name": "rmsprop", "centered": True}, r"optimizer\.state: 8bit and centered"),
    ):
        tree = {**BASE, "optimizer": {**optimizer, "state": "8bit"}}
        with pytest.raises(ConfigError, match=said):
            trained(config_of(tmp_path / "a", tree))


@pytest.mark.parametrize(
    ("state", "optimizer", "shape"),
    proof_but(
        [
            ("8bit", "adamw", "parts"),
            ("8bit", "adamw-clipped", "segments"),
            ("float32", "momentum", "trees"),
            ("bfloat16", "adamw", "parts"),
        ],
        ("8bit", "adamw", "parts"),
    ),
)
def test_weights_without_a_master(tmp_path: Path, state: str, optimizer: str, shape: str) -> None:
    """Rounded by chance, as plain PyTorch does it with the same draws; nothing else is kept."""
    config = job(tmp_path / "a", state, "bfloat16", optimizer, shape)
    model = config.model.model_copy(update={"master": "none"})
    config = config.model_copy(update={"model": model})
    run = trained(config)
    plain = reference(config)
    assert losses(run) == plain.losses
    assert_same_state(weights(run), plain)
    store = look(run)
    assert store is not None
    arrays = {row.array for record in store.records.values() for row in record.table}
    assert "remainder" not in arrays
    values = weights(run)["blocks.0.mlp.1.weight"]
    assert torch.equal(values, values.bfloat16().float())
