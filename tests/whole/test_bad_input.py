"""Bad input: one message with the way out, exit code 2, and nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from swaptrain.cli import main
from swaptrain.errors import ConfigError
from swaptrain.models.transformers_model import _check_keys, _config_class
from swaptrain.units import parse_size
from tests.whole.test_exactness import MODELS as EXACT_MODELS
from tests.whole.test_generality import MODELS

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 1,
    "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"python": "tests.support.refused:linear"}
VECTORS = {"python": "tests.support.datasets:vectors", "micro_batch": 2}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a small text file."""
    path = tmp_path / "corpus.txt"
    path.write_text("to be or not to be, that is the question\n" * 20)
    return path


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Return what writes a module of the user's, which can be imported in this test only."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, source: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)

    return write


def job(tmp_path: Path, **sections: Any) -> tuple[list[str], Path]:
    """Return the command of a small job whose sections are replaced, and its run directory."""
    run_dir = tmp_path / "here" / "run"
    tree: dict[str, Any] = {
        "model": LINEAR,
        "data": VECTORS,
        "train": {"steps": 1, "threads": 1},
        "device": "cpu",
        "memory": {"host": "64MiB"},
        "run": {"dir": str(run_dir)},
    }
    tree.update(sections)
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in tree.items() if value is not None})
    )
    return ["--config", str(path)], run_dir


def refused(command: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that has to be refused, leaving nothing; return its message."""
    before = sorted(run_dir.parent.parent.rglob("*"))
    code = main(command)
    message = capsys.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message and message.startswith("swaptrain: error: ")
    assert not run_dir.exists() and not run_dir.parent.exists()
    assert sorted(run_dir.parent.parent.rglob("*")) == before
    return message


CONFIGS: dict[str, tuple[list[str], list[str]]] = {
    "misspelt key": (["data.micro_bach=2"], ["data.micro_bach", "data.micro_batch"]),
    "unknown section": (["memry.host=1GiB"], ["memry", "memory"]),
    "size without unit": (["memory.host=4"], ["memory.host", "no unit", "GiB"]),
    "NaN": (["optimizer.lr=.nan"], ["optimizer.lr"]),
    "negative steps": (["train.steps=-1"], ["train.steps"]),
    "unknown optimizer": (["optimizer.name=adamww"], ["optimizer.name", "adamw"]),
    "argument of another": (["optimizer.momentum=0.9"], ["momentum", "AdamW"]),
    "wrong argument": (["optimizer.betas=[0.9, 1.5]"], ["optimizer", "beta"]),
    "mapping for a list": (["optimizer.betas={a: 1}"], ["AdamW refuses", "betas={'a': 1}"]),
    "device not there": (["device=cuda:7"], ["device", "cuda:7"]),
    "device budget on the CPU": (["memory.device=1GiB"], ["memory.device"]),
    "run in RAM": (["run.dir=/dev/shm/swaptrain-test-run"], ["run.dir", "tmpfs"]),
    "slots in RAM": (["store.paths=[/dev/shm/swaptrain-test-run]"], ["store.paths", "tmpfs"]),
    "slots on no disk": (
        ["store.paths=[/nowhere/a]"],
        ["store.paths: /nowhere/a", "mount its disk"],
    ),
    "no such module": (["model.python=tests.support.absent:f"], ["model.python", "absent"]),
    "no such function": (["model.python=tests.support.refused:f"], ["model.python", "'f'"]),
    "factory refuses": (["model.kwargs={depth: 3}"], ["model.python", "depth"]),
    "no such dataset": (["data.python=tests.support.datasets:f"], ["data.python"]),
    "missing model": (["model={hf: /nowhere/model}"], ["model.hf", "/nowhere/model"]),
    "unknown architecture": (["model={hf: {model_type: lama}}"], ["model.hf", "lama"]),
    "misspelt hf key": (
        ["model={hf: {model_type: llama, hiden_size: 512}}"],
        ["model.hf: unknown key 'hiden_size' for model_type llama; did you mean 'hidden_size'?"],
    ),
    "missing held-out text": (
        ["eval={text: [/nowhere/*.txt], every: 1}"],
        ["eval.text", "/nowhere"],
    ),
    "missing held-out tokens": (
        ["eval={tokens: [/nowhere/a.bin], every: 1}"],
        ["eval.tokens", "/nowhere"],
    ),
    "no such held-out dataset": (
        ["eval={python: 'tests.support.datasets:f', every: 1}"],
        ["eval.python"],
    ),
    "held-out data of another kind": (
        ["eval={python: 'tests.support.datasets:images', every: 1}"],
        ["eval: its items have", "(1, 16, 16)"],
    ),
    "missing text": (["data={text: [/nowhere/*.txt]}"], ["data.text", "/nowhere"]),
    "missing tokens": (["data={tokens: [/nowhere/a.bin]}"], ["data.tokens", "/nowhere"]),
    "no loss": (["model.python=tests.support.refused:no_loss"], ["loss"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_refused_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault of a config is one message that names its key, and leaves no file."""
    overrides, named = CONFIGS[name]
    command, run_dir = job(tmp_path)
    message = refused([*command, *overrides], run_dir, capsys)
    assert not Path("/dev/shm/swaptrain-test-run").exists()
    for word in named:
        assert word in message


def test_a_missing_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the file."""
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


@pytest.mark.trains
def test_numbers_that_yaml_reads_as_text_work(tmp_path: Path) -> None:
    """`lr: 3e-4`, which PyYAML gives as text, trains."""
    command, run_dir = job(tmp_path)
    path = Path(command[1])
    path.write_text(path.read_text() + "optimizer: {lr: 3e-4}\n")
    assert main(command) == 0
    assert (run_dir / "metrics.jsonl").read_text().count("\n") == 1


def test_a_held_out_file_that_is_too_short_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the training text is tokenised into the run directory."""
    (tmp_path / "held-out.txt").write_text("short")
    command, run_dir = job(
        tmp_path,
        model={"hf": LLAMA},
        data={"text": [str(corpus)], "sequence_length": 16},
        eval={"text": [str(tmp_path / "held-out.txt")], "every": 1},
    )
    message = refused(command, run_dir, capsys)
    assert "eval.text" in message and "sequence_length" in message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def net():\n    return 1 / 0\n", ":net failed: ZeroDivisionError: division by zero"),
        (
            "import torch\ndef net(): return torch.nn.Linear(2, 'x')\n",
            ":net failed: TypeError: ",
        ),
        ("\n1 / 0\n", "': ZeroDivisionError: division by zero"),
        ("import torch\ndef net(:\n", "': SyntaxError: "),
    ],
    ids=["factory", "in torch", "module", "syntax"],
)
def test_an_error_in_the_users_model_file_names_its_line(
    source: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    user_module: Callable[[str, str], None],
) -> None:
    """The message has the error and the user's own file and line, not torch's."""
    user_module("faulty_model", source)
    command, run_dir = job(tmp_path, model={"python": "faulty_model:net"})
    message = refused(command, run_dir, capsys)
    assert "model.python: " in message and f"faulty_model{said}" in message.replace("\n", " ")
    place = "line 2" if "SyntaxError" in said else "faulty_model.py:2)"
    assert place in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": "big"}, "model.hf: LlamaConfig: "),
        ({"hidden_act": "nothing"}, "model.hf: LlamaForCausalLM: KeyError: "),
    ],
)
def test_values_that_transformers_refuses_are_refused(
    fields: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the config class or by the model's constructor: its own words are in the message."""
    text = {"python": "tests.support.datasets:text"}
    command, run_dir = job(tmp_path, model={"hf": {**LLAMA, **fields}}, data=text)
    message = refused(command, run_dir, capsys)
    assert said in message and str(*fields.values()) in message


@pytest.mark.parametrize(
    "fields",
    [
        {**LLAMA, "rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "float32"},
        {**LLAMA, "num_labels": 3, "attn_implementation": "eager", "use_cache": False},
        {"model_type": "gpt2", "n_embd": 32, "num_attention_heads": 4, "tokenizer_class": "X"},
        {"model_type": "clip", "text_config": {"hidden_size": 32, "num_hidden_layers": 1}},
        {"model_type": "qwen3_moe", "head_dim": 16},
        *({"model_type": a.model_type or n, **a.fields} for n, a in MODELS.items()),
        *(model["hf"] for model, _ in EXACT_MODELS.values() if "hf" in model),
    ],
    ids=lambda fields: fields["model_type"],
)
def test_keys_that_transformers_knows_are_taken(fields: dict[str, Any]) -> None:
    """Fields, aliases, keys of every config, of older versions, of the model's code, parts."""
    cls = _config_class(fields["model_type"])
    # These two have another name for it, and would ignore it.
    if fields["model_type"] not in ("opt", "falcon"):
        _check_keys(cls, fields, "this")
    else:
        with pytest.raises(
            ConfigError, match="unknown key 'intermediate_size' for model_type this"
        ):
            _check_keys(cls, fields, "this")
        _check_keys(cls, fields.keys() - {"intermediate_size"}, "this")


def test_an_empty_corpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files without bytes, and fewer tokens than one sequence."""
    (tmp_path / "a.txt").write_text("")
    data = {"text": [str(tmp_path / "*.txt")], "sequence_length": 16}
    command, run_dir = job(tmp_path, model={"hf": LLAMA}, data=data)
    assert "empty" in refused(command, run_dir, capsys)
    (tmp_path / "a.txt").write_text("short")
    assert "sequence_length" in refused(command, run_dir, capsys)


def test_a_tokenizer_that_is_too_large_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has both sizes."""
    data = {"text": [str(corpus)], "sequence_length": 16}
    command, run_dir = job(tmp_path, model={"hf": {**LLAMA, "vocab_size": 100}}, data=data)
    message = refused(command, run_dir, capsys)
    assert "257" in message and "100" in message and "vocab_size" in message


@pytest.mark.parametrize("position", [3, 900])
def test_an_id_that_the_model_lacks_is_refused(
    position: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first micro-batch, which is captured, and far behind it."""
    ids = np.full(1000, 7, np.uint16)
    ids[position] = 400
    (tmp_path / "ids.bin").write_bytes(ids.tobytes())
    data = {"tokens": [str(tmp_path / "ids.bin")], "sequence_length": 16}
    command, run_dir = job(tmp_path, model={"hf": LLAMA}, data=data)
    message = refused(command, run_dir, capsys)
    assert "400" in message and "257" in message and "ids.bin" in message


@pytest.mark.trains
def test_a_sequence_longer_than_the_positions_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the model's own name for them; positions that are computed go as far as one likes."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2}
    data = {"text": [str(corpus)], "sequence_length": 48}
    model = {"hf": {**gpt2, "n_positions": 32}}
    command, run_dir = job(tmp_path, model=model, data=data)
    message = refused(command, run_dir, capsys)
    assert "data.sequence_length is 48, and n_positions of model.hf is 32" in message
    command, run_dir = job(tmp_path, model={"hf": LLAMA}, data=data)
    assert LLAMA["max_position_embeddings"] == 32 and main(command) == 0


def test_an_item_of_another_shape_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The item is named."""
    data = {"python": "tests.support.refused:two_shapes", "micro_batch": 2}
    command, run_dir = job(tmp_path, data=data)
    message = refused(command, run_dir, capsys)
    assert "item 1" in message and "17" in message


def test_data_that_the_model_does_not_take_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch whose shape the forward refuses: its own words are in the message."""
    command, run_dir = job(tmp_path, model={**LINEAR, "kwargs": {"width": 12}})
    assert "layer" in refused(command, run_dir, capsys)


@pytest.mark.trains
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("linear", "Linear takes x: it has no argument input_ids, labels and is not given x."),
        ("next_token", "NextToken takes input_ids: it has no argument labels."),
        ("paired", "Paired takes input_ids, labels, weights, scale: it is not given weights."),
        ("any_keyword", None),
    ],
)
def test_items_with_other_keys_than_the_forward_are_refused(
    model: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is captured, with both; a forward that takes any keyword gets them."""
    data = {"python": "tests.support.refused:labelled"}
    command, run_dir = job(tmp_path, model={"python": f"tests.support.refused:{model}"}, data=data)
    if said is None:
        assert main(command) == 0
        return
    message = refused(command, run_dir, capsys)
    assert f"the items' keys are input_ids, labels; the forward of {said}" in message


def test_a_model_that_depends_on_values_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the module and the operation."""
    model = {"python": "tests.support.refused:data_dependent"}
    command, run_dir = job(tmp_path, model=model)
    message = refused(command, run_dir, capsys)
    assert "gate" in message and "item" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("F.mse_loss(self.layer(x), x)", "module layer (Linear)"),
        ("(x @ torch.ones(3, 3)).mean()", "module the model itself (Net)"),
        ("x.mean() if self.layer.bias.sum() > 0 else x.sum()", "module the model itself (Net)"),
        ("F.cross_entropy(x, x.long()[:, :3])", "module the model itself (Net)"),
    ],
    ids=["in a layer of torch", "in an operation", "by a value", "in a function of torch"],
)
def test_what_cannot_be_captured_is_refused_with_its_line(
    line: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    user_module: Callable[[str, str], None],
) -> None:
    """The line is the model's own, not one of torch that it led to; the module is the innermost."""
    user_module(
        "no_graph",
        "import torch, torch.nn.functional as F\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(12, 16)\n"
        "    def forward(self, x):\n"
        f"        return {line}\n",
    )
    command, run_dir = job(tmp_path, model={"python": "no_graph:Net"})
    message = refused(command, run_dir, capsys)
    assert f"in {said}, {tmp_path / 'no_graph.py'}:7, in forward\n" in message


@pytest.mark.parametrize("paths", [False, True])
def test_a_full_disk_is_refused(
    paths: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is needed and what is free; with store.paths the path is named."""
    monkeypatch.setattr("swaptrain.planning.budgets.disk_budget.free_bytes", lambda path: 10_000)
    command, run_dir = job(tmp_path)
    if paths:
        command.append(f"store.paths=[{tmp_path / 'a'}, {tmp_path / 'b'}]")
    message = refused(command, run_dir, capsys)
    assert "9.8 KiB" in message and "needs" in message and str(run_dir) in message
    if paths:
        assert str(tmp_path / "a") in message and str(tmp_path / "b") in message


@pytest.mark.trains
def test_a_budget_that_is_too_small_names_one_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run starts and finishes with exactly the number that the refusal names."""
    command, run_dir = job(tmp_path)
    message = refused([*command, "memory.host=16MiB"], run_dir, capsys)
    size = message.partition("set memory.host to ")[2].split(",")[0]
    assert 16 * 2**20 < parse_size(size) < 64 * 2**20
    assert main([*command, f"memory.host={size}"]) == 0


def test_a_device_budget_larger_than_the_device_is_refused(tmp_path: Path) -> None:
    """Only where there is a device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    command, run_dir = job(tmp_path, device="cuda")
    assert main([*command, "memory.device=100000GiB"]) == 2
    assert not run_dir.exists()
