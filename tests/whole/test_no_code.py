"""Runs, configs, models and data of somebody else: nothing that they hold executes."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import swaptrain
from swaptrain.cli import main
from swaptrain.data.tokens.token_files import open_token_file
from swaptrain.errors import ConfigError
from tests.support.stores import Job, small_run

EVIL = "from pathlib import Path\nPath({canary!r}).write_text('it ran')\n"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a run that stopped inside a step."""
    return small_run(tmp_path / "job", "inside a step")


@pytest.mark.trains
def test_a_run_cannot_run_code(job: Job, tmp_path: Path) -> None:
    """Neither the recorded config nor a module beside it, named like a library, is imported."""
    run = job.copy()
    canary = tmp_path / "canary"
    recorded = (run / "config.yaml").read_text()
    for entry in ("tests.support.models:frozen_mlp", "tests.support.datasets:vectors"):
        assert entry in recorded
        recorded = recorded.replace(entry, "evil:build")
    (run / "config.yaml").write_text(recorded)
    for name in (
        "evil",
        "yaml",
        "argparse",
        "zarr",
        "xxhash",
        "rich",
        "torch",
        "matplotlib",
        "jinja2",
    ):
        (run / f"{name}.py").write_text(EVIL.format(canary=str(canary)))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    for verb in (["inspect", "."], ["report", "."], ["export", ".", "--to", "w.safetensors"]):
        command = [sys.executable, "-m", "swaptrain", *verb]
        done = subprocess.run(
            command, cwd=run, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        assert not canary.exists()
    # A config that the user names is not mixed with the recorded one.
    assert main(["--config", str(job.config.run.dir.with_suffix(".yaml"))]) == 2
    assert not canary.exists() and "evil" not in sys.modules


@pytest.mark.trains
def test_a_model_directory_cannot_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """auto_map is not followed, pickled weights and kernels to be downloaded are refused."""
    canary = tmp_path / "canary"
    model = tmp_path / "model"
    model.mkdir()
    fields = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1,
        "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32,
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }  # fmt: skip
    (model / "evil.py").write_text(EVIL.format(canary=str(canary)))
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 40)
    config = tmp_path / "job.yaml"
    config.write_text(
        f"model: {{hf: {model}}}\n"
        f"data: {{text: [{tmp_path}/corpus.txt], sequence_length: 16}}\n"
        f"train: {{steps: 1, threads: 1}}\nrun: {{dir: {tmp_path}/run}}\n"
        "memory: {host: 128MiB}\ndevice: cpu\n"
    )
    (model / "config.json").write_text(json.dumps(fields))
    assert main(["plan", "--config", str(config)]) == 0
    for key in ("attn_implementation", "_attn_implementation"):
        (model / "config.json").write_text(json.dumps({**fields, key: "some-one/attention"}))
        assert main(["plan", "--config", str(config)]) == 2
        assert "would be downloaded" in capsys.readouterr().err
    (model / "config.json").write_text("[" * 100_000)
    assert main(["plan", "--config", str(config)]) == 2
    (model / "config.json").write_text(json.dumps(fields))
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    assert main(["plan", "--config", str(config)]) == 2
    assert "never reads (pytorch_model.bin" in capsys.readouterr().err
    assert not canary.exists() and "evil" not in sys.modules


def test_a_tokenizer_directory_cannot_run_code(tmp_path: Path) -> None:
    """Only tokenizer.json is read; its python files and auto_map are not followed."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from swaptrain.data.tokenizer import open_tokenizer

    canary = tmp_path / "canary"
    (tmp_path / "tokenization_evil.py").write_text(EVIL.format(canary=str(canary)))
    Tokenizer(WordLevel({"</s>": 0, "a": 1}, "a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "</s>",
                "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]},
                "tokenizer_class": "tokenization_evil.Evil",
            }
        )
    )
    assert open_tokenizer(tmp_path).vocabulary == 2
    assert not canary.exists()


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_token_files_cannot_run_code(tmp_path: Path) -> None:
    """An .npy of objects and a zarr array with a pickle codec are refused unread."""
    canary = tmp_path / "canary"
    np.save(tmp_path / "a.npy", np.array([Touch(canary)], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="cannot read"):
        open_token_file(str(tmp_path / "a.npy"), key="data.tokens")
    old = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<i4", "fill_value": 0,
        "order": "C", "filters": None, "compressor": None,
    }  # fmt: skip
    new = {
        "zarr_format": 3, "node_type": "array", "data_type": "int32", "shape": [4],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "chunk_key_encoding": {"name": "default"}, "fill_value": 0,
    }  # fmt: skip
    inner = {"codecs": [{"name": "numcodecs.pickle"}]}
    for number, (name, metadata) in enumerate(
        [
            (".zarray", {**old, "filters": [{"id": "pickle"}]}),
            (".zarray", {**old, "compressor": {"id": "pickle"}}),
            ("zarr.json", {**new, "codecs": [{"name": "numcodecs.pickle", "configuration": {}}]}),
            (
                "zarr.json",
                {**new, "codecs": [{"name": "sharding_indexed", "configuration": inner}]},
            ),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(json.dumps(metadata))
        (folder / "0").write_bytes(pickle.dumps(Touch(canary)))
        with pytest.raises(ConfigError, match=r"has the codec '(numcodecs\.)?pickle'"):
            open_token_file(str(folder), key="data.tokens")
    assert not canary.exists()


PACKAGE = Path(swaptrain.__file__).parent
CODE_LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "torch.jit.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "os.popen"),
    *("time.time", "datetime.now", "datetime.datetime.now", "torch.package.PackageImporter"),
}
"""What executes what it reads, and clocks that jump."""
STAMPS = {
    ("observe/step_metrics.py", "time.time"),  # when a step ended
    ("verbs/plans/table.py", "datetime.now"),  # when a run begun now would end
    ("verbs/checkup/disk.py", "time.time"),  # how far the clock of files is from the machine's
    ("verbs/checkup/surroundings.py", "time.time"),  # whether the clock can be right
}
"""The uses of such a clock: a time of day that a person reads, never a span of time."""
PROBE = ("models/thaw.py", "_Probe.from_pretrained")
"""Given a state dict of one number and no path: it asks how transformers loads, no more."""
IMPORTERS = {"models/factory.py", "data/python_dataset.py"}
"""The files that import what the config names."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_nothing_executes_what_it_reads(path: Path) -> None:
    """No pickle, no eval, no remote code, in any file; python entries in two of them."""
    name = str(path.relative_to(PACKAGE))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            assert not {module.split(".")[0] for module in modules} & CODE_LOADERS, name
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if (name, called) not in STAMPS:
            assert called not in CALLS, f"{name}:{node.lineno} calls {called}"
        if (name, called) != PROBE:
            assert "from_pretrained" not in called and "AutoTokenizer" not in called, name
        if called.endswith("import_module"):
            assert name in IMPORTERS, f"{name}:{node.lineno}"
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert "trust_remote_code" not in keywords, name
        if called in {"np.load", "numpy.load"}:
            assert keywords.get("allow_pickle") == "False", f"{name}:{node.lineno}"
