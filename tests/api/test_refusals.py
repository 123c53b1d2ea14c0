"""What a script gets wrong is said at once, and nothing of a run is another one in silence."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import swaptrain
from swaptrain.api.objects import HandedOver, use_model
from swaptrain.api.surroundings import restored
from tests.api.test_train import COMMON, Net, items, words
from tests.chat.conftest import write_tokenizer
from tests.support.models import language

pytestmark = pytest.mark.trains

SMALL: dict[str, Any] = {**COMMON, "micro_batch": 1, "steps": 1, "sequence_length": 16}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TEXTS = ["to be or not to be, that is the question " * 4]


def model_directory(to: Path, *, tokenizer: bool) -> Path:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(to)
    if tokenizer:
        write_tokenizer(to, None)
    return to


@pytest.mark.proof
def test_texts_become_the_words_of_the_models_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the model is named; bytes of a model of words are asked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = model_directory(tmp_path / "m", tokenizer=True)
    run = swaptrain.train(model="~/m", data=TEXTS, dir=tmp_path / "a", **SMALL)
    assert run.config["data"]["tokenizer"] == str(model)
    overrides = {"model.hf": str(model)}
    run = swaptrain.train({}, overrides, data=TEXTS, dir=tmp_path / "b", **SMALL)
    assert run.config["data"]["tokenizer"] == str(model)
    assert run.config["data"]["chat"] is not None
    bare = model_directory(tmp_path / "bare", tokenizer=False)
    for other in (bare, {**LLAMA, "vocab_size": 32000}, LlamaConfig(num_hidden_layers=1)):
        with pytest.raises(swaptrain.ConfigError, match=r"tokenizer: .*tokenizer='bytes'"):
            swaptrain.train(model=other, data=TEXTS, dir=tmp_path / "c", **SMALL)
    assert not (tmp_path / "c").exists()
    swaptrain.train(model=bare, data=TEXTS, dir=tmp_path / "c", tokenizer="bytes", **SMALL)


def test_directories_are_named_as_in_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `~`, brackets, and from another current directory afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {**SMALL, "model": LLAMA, "tokenizer": "bytes"}
    run = swaptrain.train(data=TEXTS, eval=TEXTS, dir="~/r [1]$$x", **given)
    assert run.dir == tmp_path / "r [1]$x" and run.dir.is_dir()
    assert swaptrain.open("~/r [1]$$x").step == 1
    monkeypatch.chdir(tmp_path)
    relative = swaptrain.train(data=TEXTS, dir="here", **given)
    monkeypatch.chdir("/")
    assert relative.step == 1 and relative.dir == tmp_path / "here"


def test_nothing_is_written_for_a_call_that_is_refused(tmp_path: Path) -> None:
    """Nor by plan; what cannot be written is named by its number."""
    given = {**SMALL, "model": {**LLAMA, "vocab_size": 257}, "dir": tmp_path / "a"}
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "\ud800"}]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"data": TEXTS, "memory": "1MiB"}, r"memory\.host"),
        ({"data": TEXTS, "steps": -1}, r"train\.steps"),
        ({"data": ["a", "\ud800"]}, "data: text 2 is no Unicode"),
        ({"data": ["a", 3]}, "data: text 2 is int"),
        ({"data": rows}, "data: row 2 is no text or JSON"),
        ({"data": [*rows[:1], "x", 3]}, "data: row 3 is int"),
        ({"data": TEXTS, "eval": [*rows[:1], {"prompt": {1}}]}, "eval: row 2 is no text or JSON"),
    ]
    for more, said in wrong:
        with pytest.raises(swaptrain.ConfigError, match=said):
            swaptrain.train(**{**given, **more})
        assert not (tmp_path / "a").exists()
    swaptrain.plan(data=TEXTS, **{**given, "quiet": True})
    assert not (tmp_path / "a").exists()


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    """Another one would take the first one's data, threads and random states."""
    said: list[str] = []

    def other() -> None:
        with pytest.raises(swaptrain.RunError, match="another thread") as error:
            swaptrain.train(model=Net, data=items(), dir=tmp_path / "b", **COMMON)
        said.append(str(error.value))

    def step(_: dict[str, Any]) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    swaptrain.train(model=Net, data=items(), dir=tmp_path / "a", on_step=step, **COMMON)
    assert len(said) == 4


def test_modes_of_torch_are_refused_or_given_back(tmp_path: Path) -> None:
    """A run computes as it does outside of them."""
    given = {"model": Net, "data": items(), "dir": tmp_path / "a", **COMMON}
    with torch.inference_mode(), pytest.raises(swaptrain.ConfigError, match="inference_mode"):
        swaptrain.train(**given)
    with torch.autocast("cpu"), pytest.raises(swaptrain.ConfigError, match="autocast"):
        swaptrain.train(**given)
    with torch.device("meta"), pytest.raises(swaptrain.ConfigError, match="'meta'"):
        swaptrain.train(**given)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(swaptrain.ConfigError, match="float64"):
            swaptrain.train(**given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not (tmp_path / "a").exists()
    with torch.no_grad():
        assert swaptrain.train(**given).step == 4
        assert not torch.is_grad_enabled()
    with pytest.raises(LookupError), restored():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        raise LookupError
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize("changed", ["dataset", "function", "collate"])
def test_other_content_is_not_gone_on_with(tmp_path: Path, changed: str) -> None:
    """Of the same length and layout; the same content is, from other objects too."""

    def call(scale: float, steps: int) -> Any:
        data = [
            {k: v * scale if v.is_floating_point() else v for k, v in i.items()} for i in items()
        ]
        given: dict[str, Any] = {**COMMON, "model": Net, "dir": tmp_path / "a", "steps": steps}
        if changed == "collate":

            def collate(chosen: list[Any]) -> dict[str, Tensor]:
                return {
                    "x": torch.stack([i["x"] * scale for i in chosen]),
                    "y": torch.stack([i["y"] for i in chosen]),
                }

            return swaptrain.train(data=items(), collate=collate, **given)
        if changed == "function":
            del given["micro_batch"]

            def batch(step: int, micro_batch: int) -> dict[str, Tensor]:
                first = ((step - 1) * 2 + micro_batch) * 4
                return {k: torch.stack([i[k] for i in data[first : first + 4]]) for k in data[0]}

            return swaptrain.train(data=batch, **given)
        return swaptrain.train(data=data, **given)

    call(1.0, 2)
    assert call(1.0, 3).step == 3
    with pytest.raises(swaptrain.ConfigError, match="item 0 has other values in x"):
        call(1.1, 4)


def test_a_module_is_taken_over_whole(tmp_path: Path) -> None:
    """Attributes of parameters too; hooks of parameters are refused."""
    module = Net()
    module.first.weight.mark = 3  # type: ignore[attr-defined]  # as users mark what has no decay
    given = HandedOver()
    use_model(given, module)
    made = given.functions["model"]()
    assert made is not module and made.first.weight is not module.first.weight
    assert made.first.weight.mark == 3 and not hasattr(made.last.weight, "mark")
    module.last.bias.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(swaptrain.ConfigError, match=r"last\.bias has hooks"):
        swaptrain.train(model=module, data=items(), dir=tmp_path / "b", **COMMON)


def test_a_callback_that_would_wait_for_itself_is_answered(tmp_path: Path) -> None:
    """Of the live weights; a snapshot is there for it."""
    found: list[str] = []

    def commit(step: int) -> None:
        run = swaptrain.open(tmp_path / "a")
        try:
            run.export(tmp_path / "live.safetensors")
        except swaptrain.RunError as error:
            found.append(str(error))
        if step == 2:
            run.export(tmp_path / "two.safetensors", step=2)

    keep = {"store.keep": {"every": 2, "last": 1}}
    given = {"model": Net, "data": items(), "dir": tmp_path / "a"}
    run = swaptrain.train(None, keep, on_commit=commit, **given, **COMMON)
    assert run.step == 4 and "on this very thread" in found[0]
    assert (tmp_path / "two.safetensors").exists() and not (tmp_path / "live.safetensors").exists()


@pytest.mark.proof
def test_evaluations_take_any_kind_of_data(tmp_path: Path) -> None:
    """Other than the run's, with a config's own rhythm, and with what `open` is given."""
    tree = {"eval": {"every": 2}}
    given: dict[str, Any] = {"model": Net, "data": items(), "dir": tmp_path / "a", **COMMON}
    run = swaptrain.train(tree, eval=items(6), **given)
    assert run.config["eval"]["every"] == 2
    assert run.evaluate(lambda: items(6)).loss == run.evaluate().loss
    given |= {"dir": tmp_path / "b"}
    plain = swaptrain.train(**given)
    opened = swaptrain.open(tmp_path / "b", model=Net, data=items(), eval=items(6))
    assert opened.evaluate().loss == plain.evaluate(items(6)).loss
    texts = {**SMALL, "model": {**LLAMA, "vocab_size": 257}, "data": TEXTS, "eval": TEXTS}
    run = swaptrain.train(dir=tmp_path / "c", eval_every=1, **texts)
    before = sorted(path for path in (tmp_path / "c").rglob("*") if path.is_file())
    whole = run.evaluate(overrides={"eval.batches": "all"})
    tokens = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}]
    assert run.evaluate(tokens).loss > 0 and run.evaluate(TEXTS).loss == whole.loss
    assert sorted(path for path in (tmp_path / "c").rglob("*") if path.is_file()) == before


def test_items_are_left_as_they_are_for_a_function(tmp_path: Path) -> None:
    """Texts too; without it a column of text is named."""
    data = [{"text": "ab" * 8, "n": [index]} for index in range(20)]

    def collate(chosen: list[Any]) -> dict[str, Tensor]:
        assert all(type(i["n"]) is list for i in chosen)
        ids = torch.tensor([[ord(c) for c in i["text"]] for i in chosen])
        return {"input_ids": ids, "labels": ids}

    given: dict[str, Any] = {"model": language, **COMMON, "steps": 1}
    assert swaptrain.train(data=data, collate=collate, dir=tmp_path / "a", **given).step == 1
    mixed = [{"x": [0.0] * 8, "y": 1, "title": "t"} for _ in range(8)]
    with pytest.raises(swaptrain.ConfigError, match="item 0 has text in title"):
        swaptrain.train(model=Net, data=mixed, dir=tmp_path / "b", **COMMON)

    def lists(step: int, micro_batch: int) -> dict[str, Any]:
        return {"x": [[0.0] * 8] * 4, "y": [1] * 4}

    batches = {name: value for name, value in COMMON.items() if name != "micro_batch"}
    assert swaptrain.train(model=Net, data=lists, dir=tmp_path / "c", **batches).step == 4

    def texts(step: int, micro_batch: int) -> dict[str, Any]:
        return {"x": ["a"] * 4}

    with pytest.raises(swaptrain.ConfigError, match="no tensors"):
        swaptrain.train(model=Net, data=texts, dir=tmp_path / "d", **batches)


def test_errors_have_fields(tmp_path: Path) -> None:
    """That a script can go by: problems with their keys, a budget that works."""
    given: dict[str, Any] = {"model": language, "data": words, "dir": tmp_path / "a", **COMMON}
    with pytest.raises(swaptrain.ConfigError) as wrong:
        swaptrain.train(**{**given, "steps": -1, "memory": "lots"})
    assert {problem.key for problem in wrong.value.problems} == {"train.steps", "memory.host"}
    assert all(problem.place == "argument" for problem in wrong.value.problems)
    with pytest.raises(swaptrain.BudgetError) as small:
        swaptrain.train(**{**given, "memory": "1MiB"})
    assert small.value.key == "memory.host" and small.value.enough is not None
    assert swaptrain.train(**{**given, "memory": small.value.enough}).step == 4
    for error in (wrong.value, small.value, swaptrain.NotFiniteError("x", step=3)):
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
        assert vars(copy.copy(error)) == vars(error)
