"""Models of a factory that begin from safetensors (`model.weights`): bits, names, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swaptrain.config.load import load_config
from swaptrain.data import open_data
from swaptrain.errors import ConfigError
from swaptrain.models.stored.checkpoint import Checkpoint
from swaptrain.models.stored.own_names import OwnNames
from swaptrain.reference import train_reference
from swaptrain.verbs.inspection.report import read_run
from swaptrain.verbs.train import train
from tests.support.matrix import every, proof_but
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights

HEAD = ("head.weight", "head.bias")


class Backbone(nn.Module):
    """What a library of models gives: an image to the scores of classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.stem(images)).relu()
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden.mean(dim=(2, 3)))


class Wrapped(nn.Module):
    """What a user writes around it: the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixel_values)
        return {
            "loss": nn.functional.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(dim=-1) == labels).float().mean(),
        }


class Twins(Wrapped):
    """Has the names of a backbone twice."""

    def __init__(self) -> None:
        super().__init__(Backbone(10))
        self.teacher = Backbone(10).requires_grad_(False)


class TiedTwice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(self.first(x).relu()), x)


def wrapped(classes: int = 10) -> nn.Module:
    return Wrapped(Backbone(classes))


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return Wrapped(timm.create_model(name, in_chans=1, **options))


def twins() -> nn.Module:
    return Twins()


def tied() -> nn.Module:
    return TiedTwice()


def other_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict with values that no seed of a run gives."""
    generator = torch.Generator().manual_seed(99)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.05)
        else:
            tensor.add_(3)
    return state


def saved(to: Path, module: nn.Module | None = None) -> Path:
    """Save a backbone of 12 classes, or another module, without the wrapper."""
    to.parent.mkdir(parents=True, exist_ok=True)
    save_file(other_weights(Backbone(12) if module is None else module), to)
    return to


def split_in_two(file: Path) -> Path:
    """Save the same in two files, and return their index."""
    tensors = load_file(file)
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == part}, file.with_name(part))
    file.unlink()
    index = file.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": places}))
    return index


def tree_of(
    file: Path, except_: list[str] | None = None, make: str = "wrapped", **sections: Any
) -> dict[str, Any]:
    data = "tests.support.datasets:" + ("vectors" if make == "tied" else "pictures")
    model = {"python": f"{__name__}:{make}", "weights": str(file), "weights_except": except_}
    return {"model": model, "data": {"python": data}, "memory": {"segment": "2KiB"}, **sections}


def assert_trains_on(
    tmp_path: Path, tree: dict[str, Any], make: Callable[[], nn.Module], stored: dict[str, Tensor]
) -> Path:
    """Compare a run with a plain loop that loads the stored tensors itself."""
    config = config_of(tmp_path / "run", {**tree, "train": {"steps": 3}})
    run_dir = trained(config)
    batches = open_data(config.data, seed=3, run_dir=tmp_path / "plain", model_vocabulary=None)

    def loaded() -> nn.Module:
        module = make()
        done = module.load_state_dict({f"net.{n}": t for n, t in stored.items()}, strict=False)
        assert not done.unexpected_keys
        return module

    plain = train_reference(
        loaded,
        batches.batch,
        steps=3,
        micro_batches=3,
        seed=3,
        lr=1e-2,
        weight_decay=0.1,
        arguments=config.resolved().optimizer.arguments,
    )
    assert losses(run_dir) == plain.losses
    found = weights(run_dir)
    tensors = {**plain.buffers, **plain.parameters}
    assert_same_bits(found, {name: tensors[name] for name in found})
    return run_dir


@pytest.mark.trains
def test_training_on_with_another_head_equals_plain_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All losses, weights and running means; the head begins as the factory makes it."""
    file = saved(tmp_path / "weights/model.safetensors")
    stored = {name: tensor for name, tensor in load_file(file).items() if name not in HEAD}
    index = split_in_two(file)
    tree = tree_of(index.parent, ["head.*"])
    run_dir = assert_trains_on(tmp_path, tree, wrapped, stored)
    said = capsys.readouterr().out
    assert "the names in" in said and "are those of net" in said
    assert f"not taken from {index.parent}: net.head.weight, net.head.bias" in said
    assert "compared with plain PyTorch: same bits" in said
    assert read_run(run_dir).origin == str(index.parent)


TIMM = {"vit_tiny_patch16_224": {"img_size": 32}, "resnet10t": {}, "convnext_atto": {}}


@pytest.mark.proof
@pytest.mark.trains
@pytest.mark.parametrize("name", TIMM)
def test_a_model_of_timm_trains_on_as_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    """A vision transformer, a ResNet, a ConvNeXt; the file has the names that timm gives."""
    timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    options = {**TIMM[name], "num_classes": 10}
    file = saved(
        tmp_path / "weights.safetensors", timm.create_model(name, in_chans=1, **TIMM[name])
    )
    head = timm.create_model(name, **options).default_cfg["classifier"]
    stored = {n: t for n, t in load_file(file).items() if not n.startswith(f"{head}.")}
    tree = tree_of(file, [f"{head}.*"], "timm_model", memory={"segment": "4MiB"})
    tree["model"]["kwargs"] = {"name": name, **options}
    tree["data"] = {"python": "tests.models.test_weights:larger_pictures"}
    assert_trains_on(tmp_path, tree, lambda: timm_model(name, **options), stored)


class Larger:
    """Images of 32 by 32."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(1, 32, 32, generator=generator)
        return {"pixel_values": image, "labels": torch.tensor(index % 10)}


def larger_pictures() -> Larger:
    return Larger()


@pytest.mark.trains
@pytest.mark.parametrize(
    ("dtype", "kind"), proof_but([("bfloat16", "file"), ("float32", "index")], ("bfloat16", "file"))
)
def test_all_is_taken_and_needed_once(dtype: str, kind: str, tmp_path: Path) -> None:
    """The masters are what is stored. The run goes on without the file; `export` is begun from."""
    file = saved(tmp_path / "model.safetensors", wrapped())
    stored = load_file(file)
    named = split_in_two(file) if kind == "index" else file
    still = {"optimizer": {"name": "sgd", "lr": 1e-300, "weight_decay": 0.0}}
    tree = tree_of(named, **still)
    tree["model"]["dtype"] = dtype
    train(config_of(tmp_path / "run", {**tree, "train": {"steps": 1}}))
    named.unlink()
    found = weights(trained(config_of(tmp_path / "run", {**tree, "train": {"steps": 2}})))
    buffers = {name for name, _ in wrapped().named_buffers()}
    taken = {name: tensor for name, tensor in found.items() if name not in buffers}
    assert_same_bits(taken, {name: stored[name] for name in taken})
    steps = found["net.norm.num_batches_tracked"]
    assert steps == stored["net.norm.num_batches_tracked"] + 2 * 3
    save_file(found, tmp_path / "next.safetensors")
    second = tree_of(tmp_path / "next.safetensors", train={"steps": 0}, **still)
    assert_same_bits(weights(trained(config_of(tmp_path / "second", second))), found)


@pytest.mark.trains
@pytest.mark.parametrize("kept", ["first.weight", "last.weight"])
def test_a_tied_weight_is_taken_by_any_of_its_names(kept: str, tmp_path: Path) -> None:
    """As `safetensors.torch.save_model` writes it: once."""
    state = other_weights(tied())
    state["last.weight"] = state["first.weight"].clone()
    other = {"first.weight": "last.weight", "last.weight": "first.weight"}[kept]
    save_file({n: t for n, t in state.items() if n != other}, tmp_path / "one.safetensors")
    tree = tree_of(tmp_path / "one.safetensors", make="tied", train={"steps": 0})
    found = weights(trained(config_of(tmp_path / "run", tree)))
    assert_same_bits(found, {name: state[name] for name in found})
    state[other] += 1
    save_file(state, tmp_path / "two.safetensors")
    tree = tree_of(tmp_path / "two.safetensors", make="tied")
    with pytest.raises(ConfigError, match=r"different values of .*, which the model ties to one"):
        train(config_of(tmp_path / "refused", tree))


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["blocks.1.weight"], tensors["norm.running_mean"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.9.weight"] = torch.zeros(2)


def _rename(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"module_{name}"] = tensors.pop(name)


def _quantise(tensors: dict[str, Tensor]) -> None:
    tensors["stem.weight"] = tensors["stem.weight"].to(torch.int8)


def _none(tensors: dict[str, Tensor]) -> None:
    pass


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], None], list[str] | None, str]] = {
    "lacks": (_drop, ["head.*"], r"lacks 2 .* tensors: net.norm.running_mean, net.blocks.1.weight"),
    "holds": (_add, ["head.*"], r"holds 1 that the model has no place for: net.blocks.9.weight"),
    "shape": (
        _none,
        None,
        r"has net.head.* in the shape \(12.*\), the model in \(10.*weights_except: \[\"net.head.\*",
    ),
    "another's": (_rename, None, r"lacks 14 of the model's 14 .* holds 14 .*module_"),
    "int8": (_quantise, ["head.*"], "stem.weight of .* is stored in I8"),
    "glob": (_none, ["heat.*"], r"weights_except: 'heat.\*' matches no tensor; the nearest"),
}


@pytest.mark.trains
@pytest.mark.parametrize("name", every(3, TENSORS))
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """In one line, with what to do, and nothing is written."""
    damage, except_, message = TENSORS[name]
    file = saved(tmp_path / "model.safetensors")
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=message) as refused:
        train(config_of(tmp_path / "run", tree_of(file, except_)))
    assert "\n" not in str(refused.value) and "model.weights" in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.trains
def test_names_of_two_modules_alike_are_refused(tmp_path: Path) -> None:
    """Nothing says whether the net or its teacher is meant."""
    file = saved(tmp_path / "model.safetensors", Backbone(10))
    with pytest.raises(ConfigError, match="are those of net and of teacher: save them under"):
        train(config_of(tmp_path / "run", tree_of(file, make="twins")))


FILES = {
    "pickled": ("model.pth", r"model.pth is no safetensors .*torch.load\('model.pth', weights_on"),
    "bin": ("pytorch_model.bin", r"save_file\(torch.load\('pytorch_model.bin', weights_only=True"),
    "kind": ("weights.txt", "weights.txt is no file of safetensors, its index"),
    "gone": ("none", "none does not exist; give a file of safetensors"),
    "no file": ("none.safetensors", "none.safetensors is no file: fetch it again"),
    "spoilt": ("spoilt.safetensors", "cannot read .*spoilt.safetensors: .* fetch it again"),
    "empty": ("empty", "empty holds neither model.safetensors nor model.safetensors.index.json$"),
    "other names": ("held", "nor .*; it holds a.safetensors: name the file itself"),
}


@pytest.mark.trains
@pytest.mark.parametrize("name", every(2, FILES))
def test_files_that_are_no_safetensors_are_refused(name: str, tmp_path: Path) -> None:
    """Each says what there is to give."""
    torch.save({}, tmp_path / "model.pth")
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "weights.txt").write_text("x")
    (tmp_path / "spoilt.safetensors").write_bytes(b"no weights")
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "held/a.safetensors")
    given_, message = FILES[name]
    with pytest.raises(ConfigError, match=message) as refused:
        train(config_of(tmp_path / "run", tree_of(tmp_path / given_)))
    assert str(refused.value).startswith("model.weights: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hf": "x", "weights": "y"}, "weights belong to python; those of hf lie beside"),
        ({"python": "a:b", "weights_except": ["x"]}, "weights_except belongs to weights"),
        ({"python": "a:b", "weights": 3}, "wanted text"),
    ],
)
def test_keys_that_do_not_belong_are_refused(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before anything is looked at."""
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path / "run", {"model": model, "data": {"python": "a:b"}})


def test_a_name_of_the_hub_is_found_where_timm_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timm fetches the file of the weights, and no config.json."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--timm--vit_tiny"
    snapshot = home / "snapshots/abc"
    saved(snapshot / "model.safetensors")
    (home / "refs").mkdir()
    (home / "refs/main").write_text("abc")
    config = config_of(tmp_path / "run", tree_of(Path("timm/vit_tiny")))
    assert config.model.weights == snapshot
    assert load_config(tmp_path / "run.yaml").model.weights == snapshot


names = st.lists(st.sampled_from(["a.w", "a.b", "b.a.w", "c", "w", "b.w"]), min_size=1, unique=True)


@given(names, st.sampled_from(["", "net.", "net.inner."]))
def test_each_tensor_is_found_below_any_module(
    tmp_path_factory: pytest.TempPathFactory, inner: list[str], path: str
) -> None:
    """A file of a module's own state fits it, wherever it is in the model, or is refused."""
    file = tmp_path_factory.mktemp("names") / "model.safetensors"
    save_file({name: torch.zeros(1) for name in inner}, file)
    places = {path + name: torch.zeros(1) for name in inner}
    try:
        found, _ = OwnNames().find(places, Checkpoint(file, [file], key="model.weights"))
    except ConfigError as error:
        assert "save them under the names of the whole model" in str(error)
        assert path
    else:
        assert found == {path + name: name for name in inner}
