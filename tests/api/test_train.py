"""`swaptrain.train`: a run of objects that a script has."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import swaptrain
from swaptrain.cli import main
from swaptrain.observe.memory_usage import resident_bytes
from tests.support.models import language
from tests.support.runs import assert_same_bits

pytestmark = pytest.mark.trains

COMMON: dict[str, Any] = {
    "memory": "256MiB", "micro_batch": 4, "micro_batches": 2, "steps": 4, "quiet": True,
    "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0}, "seed": 3,
}  # fmt: skip


class Net(nn.Module):
    """Returns its loss in a dict."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.last(F.relu(self.first(x))), y)}


def items(count: int = 40) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=g), "y": torch.randint(0, 4, (), generator=g)}
        for _ in range(count)
    ]


def by_hand(module: nn.Module, steps: int, data: list[dict[str, Tensor]]) -> list[float]:
    """Train in the order of the data with torch alone; return the losses of the steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0, fused=True)
    losses = []
    for step in range(steps):
        found = []
        for m in range(2):
            first = (step * 2 + m) * 4
            batch = {k: torch.stack([i[k] for i in data[first : first + 4]]) for k in data[0]}
            loss = module(**batch)["loss"]
            (loss / 2).backward()
            found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(found) / 2)
    return losses


def weights(run: Any) -> dict[str, Tensor]:
    return dict(run.weights())


def test_a_lambda_trains_as_torch_does(tmp_path: Path) -> None:
    """Bit for bit; the run gives its weights to a module, and goes on with the same call."""
    data = items()
    keys = {"data.shuffle": False}
    torch.manual_seed(3)
    plain = Net()
    losses = by_hand(plain, 4, data)
    run = swaptrain.train(None, keys, model=lambda: Net(), data=data, dir=tmp_path / "a", **COMMON)
    assert [row["loss"] for row in run.metrics] == losses
    assert_same_bits(weights(run), plain.state_dict())
    other = Net()
    run.load_into(other)
    assert_same_bits(other.state_dict(), plain.state_dict())
    with pytest.raises(swaptrain.ConfigError, match=r"has \(32, 8\) where the run has first"):
        run.load_into(Net(32))
    more = {**COMMON, "steps": 5}
    again = swaptrain.train(None, keys, model=lambda: Net(), data=data, dir=tmp_path / "a", **more)
    assert again.step == 5 and repr(again) == f"<swaptrain run {tmp_path / 'a'}, step 5>"
    assert swaptrain.open(tmp_path / "a").metrics == again.metrics


def test_a_module_gives_its_weights_and_keeps_them(tmp_path: Path) -> None:
    """One that is large is refused with the function that makes it."""
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = swaptrain.train(model=module, data=items(), dir=tmp_path / "a", **{**COMMON, "steps": 0})
    assert_same_bits(weights(run), before)
    run = swaptrain.train(model=module, data=items(), dir=tmp_path / "a", **COMMON)
    assert_same_bits(module.state_dict(), before)
    assert not torch.equal(weights(run)["first.weight"], before["first.weight"])
    with torch.device("meta"):
        large = nn.Linear(8, 8)
    with pytest.raises(swaptrain.ConfigError, match=r"model=lambda: Linear\(\.\.\.\)"):
        swaptrain.train(model=large, data=items(), dir=tmp_path / "b", **COMMON)


def test_a_function_of_the_step_gives_batches(tmp_path: Path) -> None:
    """Its step counts from 1, its micro-batch from 0; it goes on where it stopped."""
    data = items()

    def batch(step: int, micro_batch: int) -> dict[str, Tensor]:
        first = ((step - 1) * 2 + micro_batch) * 4
        return {k: torch.stack([i[k] for i in data[first : first + 4]]) for k in data[0]}

    given = {name: value for name, value in COMMON.items() if name != "micro_batch"}
    torch.manual_seed(3)
    losses = by_hand(Net(), 4, data)
    for steps in (2, 4):
        more = {**given, "steps": steps}
        run = swaptrain.train(model=lambda: Net(), data=batch, dir=tmp_path / "a", **more)
    assert [row["loss"] for row in run.metrics] == losses
    with pytest.raises(swaptrain.ConfigError, match="micro_batch is 2, and the batches"):
        swaptrain.train(model=Net, data=batch, dir=tmp_path / "b", **{**given, "micro_batch": 2})
    for wrong, said in ((lambda s, m: 3, "a dict of tensors"), (lambda s: 3, "takes s")):
        with pytest.raises(swaptrain.ConfigError, match=said):
            swaptrain.train(model=Net, data=wrong, dir=tmp_path / "b", **given)
    assert not (tmp_path / "b").exists()


def test_texts_and_rows_are_written_into_the_run(tmp_path: Path) -> None:
    """Under a name of their content: other ones are another run's."""
    texts = ["to be or not to be, that is the question " * 4, "whether it is nobler in the mind "]
    model = {"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32,
             "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
    given = {**COMMON, "micro_batch": 1, "steps": 2, "sequence_length": 32, "tokenizer": "bytes"}
    given |= {"model": model, "dir": tmp_path / "a"}
    run = swaptrain.train(data=texts, eval=texts, eval_every=1, **given)
    (glob,) = run.config["data"]["text"]
    files = sorted(Path(glob).parent.glob("*.txt"))
    assert [file.read_text() for file in files] == texts
    found = run.evaluate(texts[:1])
    assert found.perplexity is not None and "accuracy" in found.scalars
    assert run.evaluate().loss == run.metrics[-1]["eval_loss"]
    assert len(run.generate("to be", max_new_tokens=3)) <= 3
    with pytest.raises(swaptrain.ConfigError, match=r"data\.text"):
        swaptrain.train(data=texts[:1], eval=texts, eval_every=1, **given)


def test_callbacks_see_and_may_end_a_run(tmp_path: Path) -> None:
    """What they raise comes out; nothing is lost, and the bits are those of a run without."""
    rows: list[dict[str, Any]] = []
    evaluated: list[int] = []
    committed: list[int] = []
    more: dict[str, Any] = {"model": Net, "data": items(), "eval": items(6), "eval_every": 2}

    def watch(row: dict[str, Any]) -> None:
        rows.append(row)
        if row["step"] == 3 and len(rows) == 3:
            raise LookupError("enough")

    def start(name: str, **given: Any) -> Any:
        return swaptrain.train(dir=tmp_path / name, **{**COMMON, **more, **given})

    heard = {"on_eval": lambda row: evaluated.append(row["step"]), "on_commit": committed.append}
    with pytest.raises(LookupError, match="enough"):
        start("a", on_step=watch, **heard)
    assert [row["step"] for row in rows] == [1, 2, 3] and evaluated == [2]
    assert committed == sorted(set(committed)) and set(committed) <= {1, 2, 3}
    run = start("a", on_step=watch, **heard)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert evaluated == [2, 4] and committed[-1] == 4
    plain = start("b")
    assert_same_bits(weights(run), weights(plain))
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain.metrics]


def test_an_interrupt_is_one_and_the_call_goes_on(tmp_path: Path) -> None:
    """After the instruction in progress."""
    data = items()

    def interrupt(row: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        swaptrain.train(model=Net, data=data, dir=tmp_path / "a", on_step=interrupt, **COMMON)
    run = swaptrain.train(model=Net, data=data, dir=tmp_path / "a", **COMMON)
    plain = swaptrain.train(model=Net, data=data, dir=tmp_path / "b", **COMMON)
    assert_same_bits(weights(run), weights(plain))


def test_nothing_is_left_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor written, with quiet; and another thread may train."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    torch.set_num_threads(3)
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    environment, path, threads = dict(os.environ), list(sys.path), {*threading.enumerate()}
    frozen = gc.get_freeze_count()
    swaptrain.train(model=Net, data=items(), dir=tmp_path / "a", **COMMON)
    assert capfd.readouterr() == ("", "")
    assert torch.get_num_threads() == 3
    assert dict(os.environ) == environment and sys.path == path
    new = {thread.name for thread in {*threading.enumerate()} - threads}
    assert new <= {"zarr_io"}  # which the zarr package keeps
    assert gc.get_freeze_count() == frozen
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert float(torch.rand(())) == float(torch.rand((), generator=torch.manual_seed(1)))
    assert random.random() == random.Random(1).random()
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(
            swaptrain.train(model=Net, data=items(), dir=tmp_path / "b", **COMMON)
        )
    )
    thread.start()
    thread.join()
    assert_same_bits(weights(found[0]), weights(swaptrain.open(tmp_path / "a")))


@pytest.mark.proof
def test_the_hub_is_reached_again_behind_a_run(tmp_path: Path) -> None:
    """A run downloads nothing, and a script may afterwards; transformers warns again."""
    script = f"""
        import os, swaptrain
        model = {{"model_type": "llama", "vocab_size": 257, "hidden_size": 16,
                  "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}}
        swaptrain.train(model=model, data=["to be or not " * 9], dir={str(tmp_path / "a")!r},
                        steps=1, sequence_length=16, memory="256MiB", quiet=True)
        import transformers
        from huggingface_hub import constants
        print(constants.HF_HUB_OFFLINE, "HF_HUB_OFFLINE" in os.environ)
        print(transformers.logging.get_verbosity())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False", "30"]


def test_the_command_line_goes_on_where_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With functions that it can import; of others it says what to do."""
    run = swaptrain.train(model=language, data=lambda: words(), dir=tmp_path / "a", **COMMON)
    assert run.config["model"]["python"] == "tests.support.models:language"
    capsys.readouterr()
    assert main(["--config", str(tmp_path / "a" / "config.yaml"), "train.steps=5"]) == 2
    said = capsys.readouterr().err
    assert "the data of this run was handed over by a Python script" in said
    run = swaptrain.train(model=language, data=words, dir=tmp_path / "b", **COMMON)
    with pytest.raises(swaptrain.ConfigError, match=r"data\.python of .* code is not taken from"):
        swaptrain.open(tmp_path / "b", model=language).evaluate(words())
    again = swaptrain.open(tmp_path / "b", model=language, data=words)
    assert again.evaluate(words()) == run.evaluate(words())
    assert main(["--config", str(tmp_path / "b" / "config.yaml"), "train.steps=5"]) == 0
    assert run.step == 5


class Words:
    """Tokens of a small vocabulary."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor([(index * 7 + j) % 300 for j in range(8)])
        return {"input_ids": ids, "labels": ids}


def words() -> Words:
    return Words()


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """As in a YAML file, with the keys; nothing is written."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": 3}, "model: found int; give a function"),
        ({"data": 3}, "data: found int; give a file"),
        ({"data": "x.what"}, "data x.what: give files of one kind"),
        ({"memory": "lots"}, r"argument: memory\.host: 'lots' is not a size"),
        ({"optimizer": {"name": "adamw", "rate": 1}}, "optimizer.rate"),
        ({"dir": None}, "dir: give the directory"),
    ]
    for given, said in wrong:
        call = {"model": Net, "data": items(), "dir": tmp_path / "a", **COMMON, **given}
        with pytest.raises(swaptrain.ConfigError, match=said):
            swaptrain.train(**call)
    with pytest.raises(swaptrain.ConfigError, match="not a run directory"):
        swaptrain.open(tmp_path / "none")
    with pytest.raises(swaptrain.ConfigError, match="has no argument stepps"):
        swaptrain.plan(model=Net, data=items(), dir=tmp_path / "a", stepps=3)
    report = swaptrain.plan(model=Net, data=items(), dir=tmp_path / "a", steps=3, quiet=True)
    assert report.parameters == sum(p.numel() for p in Net().parameters())
    assert not (tmp_path / "a").exists()


def test_a_config_and_dotted_keys(tmp_path: Path) -> None:
    """A mapping, or a file, under arguments, under keys."""
    tree = {"model": {"python": "tests.support.models:language"}, "train": {"steps": 1}}
    tree |= {"data": {"python": "tests.api.test_train:words"}, "memory": {"host": "256MiB"}}
    run = swaptrain.train(tree, {"train.steps": 3, "run.dir": str(tmp_path / "a")}, quiet=True)
    assert run.step == 3 and tree["train"] == {"steps": 1}
    path = tmp_path / "job.yaml"
    path.write_text((tmp_path / "a" / "config.yaml").read_text())
    assert swaptrain.train(path, steps=4, quiet=True).step == 4


@pytest.mark.proof
def test_ten_runs_take_the_memory_of_one(tmp_path: Path) -> None:
    """And have the same bits."""
    taken, first = [], None
    for number in range(10):
        given = {**COMMON, "dir": tmp_path / str(number)}
        found = weights(swaptrain.train(model=Net, data=items(), **given))
        first = first or found
        assert_same_bits(found, first)
        taken.append(resident_bytes())
    assert max(taken[3:]) - min(taken[3:]) < 8 << 20, taken


@pytest.mark.proof
def test_a_killed_script_goes_on(tmp_path: Path) -> None:
    """Run again as it is."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, swaptrain
            from tests.api.test_train import COMMON, Net, items
            def kill(row):
                if len(sys.argv) > 1 and row["step"] == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            run = swaptrain.train(model=lambda: Net(), data=items(), dir={str(tmp_path / "a")!r},
                                  on_step=kill, **COMMON)
            print(run.step)
            """
        )
    )
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run([*command, "kill"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout == b"4\n"
    plain = swaptrain.train(model=lambda: Net(), data=items(), dir=tmp_path / "b", **COMMON)
    assert_same_bits(weights(swaptrain.open(tmp_path / "a")), weights(plain))


def test_importing_is_light() -> None:
    """Neither torch nor pydantic: that comes with the first call."""
    shows = (
        "import sys, swaptrain; print(sorted({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", shows], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
