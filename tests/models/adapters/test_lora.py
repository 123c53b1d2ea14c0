"""Adapters: the bits of plain PEFT, in and out."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from swaptrain.config.load import load_config
from swaptrain.data import open_data
from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.planning.planner import Plan, Planner
from swaptrain.planning.prepare import Prepared
from swaptrain.reference import train_reference
from swaptrain.store.format.root import RootRecord, create_root, read_root
from swaptrain.store.paths import RunPaths
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.inspect import inspect_run
from swaptrain.verbs.plan import plan
from swaptrain.verbs.train import train
from tests.models.stored.test_pretrained import BERT, MIXTRAL, loaded, saved
from tests.support.matrix import proof_but
from tests.support.plain import PlainRuns
from tests.support.runs import (
    adapted,
    assert_same_bits,
    assert_same_state,
    config_of,
    losses,
    norms,
    trained,
    weights,
)
from tests.whole.test_exactness import GPT2, LLAMA, T5

UNTIED = {**LLAMA, "tie_word_embeddings": False}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 32, "sliding_window": 8,
}  # fmt: skip
VIT: dict[str, Any] = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_channels": 1,
    "num_labels": 10, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "architectures": ["ViTForImageClassification"],
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "llama": (UNTIED, "text", {}),
    "gpt2": (GPT2, "text", {"target_modules": ["c_attn", "c_proj"]}),
    "gemma3": (GEMMA3, "text", {}),
    "mixtral": (MIXTRAL, "text", {"target_modules": ["q_proj", "v_proj"]}),
    "bert": (BERT, "text", {"target_modules": ["query", "value"]}),
    "vit": (VIT, "pictures", {"target_modules": ["q_proj", "v_proj"]}),
    "t5": (T5, "text", {"target_modules": ["q", "v"]}),
    "function": ({"python": "tests.support.models:gpt"}, "tokens", {"target_modules": ["project"]}),
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "init_lora_weights": "gaussian", "bias": "all"},
    "dora": {"use_dora": True},
    "random": {"init_lora_weights": False, "rank_pattern": {"v_proj": 2}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "uncut": {"memory": {"segment": "64MiB"}},
    "small segments": {"memory": {"segment": "4KiB"}, "train": {"recompute": True}},
    "saving": {"memory": {"segment": "16KiB"}, "train": {"recompute": False}},
    "clipped": {"memory": {"segment": "16KiB"}, "optimizer": {"clip_norm": 0.3}},
    "smallest pool": {"memory": {"segment": "16KiB"}, "train": {"recompute": True}},
}
DTYPES = ["float32", "bfloat16"]
CASES = [
    *(("llama", "lora", "smallest pool", "float32"), ("gpt2", "dora", "clipped", "float32")),
    *(("gemma3", "random", "saving", "bfloat16"), ("mixtral", "rslora", "uncut", "float32")),
    *(("bert", "lora", "small segments", "bfloat16"), ("vit", "random", "clipped", "float32")),
    *(("t5", "rslora", "saving", "bfloat16"), ("function", "dora", "uncut", "bfloat16")),
]
"""Each value, each kind in both dtypes; all combinations run by hand alone."""

pytestmark = [
    pytest.mark.trains,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT's own
]


def lora_config(tmp_path: Path, name: str, kind: str = "lora", **tree: Any) -> Any:
    fields, data, section = MODELS[name]
    source = fields if "python" in fields else {"hf": fields}
    fixed: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    return config_of(
        tmp_path / "run",
        {
            "optimizer": {"lr": 1e-2},
            **tree,
            "model": {**source, **tree.get("model", {})},
            "data": {"python": f"tests.support.datasets:{data}"},
            "lora": {**fixed, **section, **KINDS[kind], **tree.get("lora", {})},
        },
    )


@pytest.mark.parametrize(
    ("model", "kind", "variant", "dtype"),
    proof_but(
        product(MODELS, KINDS, VARIANTS, DTYPES),
        *CASES,
        whole=[c for c in product(MODELS, KINDS, VARIANTS, DTYPES) if c not in CASES],
    ),
)
def test_the_same_bits_as_plain_peft(
    model: str,
    kind: str,
    variant: str,
    dtype: str,
    tmp_path: Path,
    plain_runs: PlainRuns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the constructor's weights and `manual_seed` before the adapters, cut or uncut.

    With the smallest pool there are slabs for one instruction, so that nearly all is spilled.
    """
    tree = {**VARIANTS[variant], "model": {"dtype": dtype}}
    config = lora_config(tmp_path, model, kind, **tree)
    if variant == "smallest pool":
        plan_of = Planner.plan

        def smallest(planner: Planner) -> Plan:
            found = plan_of(planner)
            return replace(found, pool_bytes=found.peaks.instruction_bytes)

        monkeypatch.setattr(Planner, "plan", smallest)
    run_dir = trained(config)
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    if variant == "clipped" or dtype == "float32":
        assert norms(run_dir) == plain.grad_norms
    assert_same_state(weights(run_dir), plain)


def test_small_adapters_are_committed_with_the_step_and_nothing_else_is_written(
    tmp_path: Path, plain_runs: PlainRuns
) -> None:
    """`store.commit.unit: null`: no value that crosses a boundary goes to the disk."""
    tree = {
        "lora": {"r": 1, "target_modules": ["q_proj"]},
        "memory": {"segment": "16KiB"},
        "store": {"commit": {"lag": 1, "unit": None}},
    }
    config = lora_config(tmp_path, "llama", **tree)
    run_dir = trained(config)
    root = read_root(run_dir)
    assert root is not None and root.unit == "step" and len(root.segments) > 3
    assert not RunPaths(run_dir).spill_folder("values").exists()
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(UNTIED, tmp_path_factory.mktemp("lora") / "base", dtype=torch.bfloat16)


SAVED: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "dora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"],
             "layers_to_transform": [0, 2]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    proof_but(
        [*zip(SAVED, 2 * DTYPES, strict=True)],
        ("lora", "float32"),
        whole=[("embedding", "float32")],
    ),
)
def test_from_a_checkpoint_to_peft_and_back(
    kind: str, dtype: str, base: Path, tmp_path: Path
) -> None:
    """Begun from a base, written as PEFT does, loaded by it; merged; and gone on with."""
    section = {"r": 4, "lora_alpha": 6, **SAVED[kind]}
    tree = {
        "model": {"hf": str(base), "dtype": dtype},
        "data": {"python": "tests.support.datasets:text"},
        "memory": {"segment": "16KiB"},
        "lora": section,
    }
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    data = open_data(config.data, seed=3, run_dir=tmp_path / "plain", model_vocabulary=64)
    plain = train_reference(
        lambda: adapted(lambda: loaded(base), section, 3),
        data.batch,
        steps=5,
        micro_batches=3,
        seed=3,
        lr=1e-2,
        weight_decay=0.1,
        dtype=getattr(torch, dtype),
    )
    assert losses(run_dir) == plain.losses
    exact = weights(run_dir)
    assert_same_state(exact, plain)

    adapter = tmp_path / "adapter"
    export_weights(run_dir, adapter, None, form="adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    with_adapter = peft.PeftModel.from_pretrained(model, adapter)
    own = dict(with_adapter.base_model.model.named_parameters())
    root = read_root(run_dir)
    assert root is not None and root.adapter is not None
    names = root.adapter.names
    file = load_file(adapter / "adapter_model.safetensors")
    assert file.keys() == names.keys()
    for saved_name, name in names.items():
        assert torch.equal(file[saved_name].to(own[name].dtype), own[name]), name
        assert torch.equal(file[saved_name], exact[name]), name

    ids = torch.arange(12)[None] % 64
    merged = tmp_path / "merged"
    export_weights(run_dir, merged, None, form="merged")
    ours = transformers.AutoModelForCausalLM.from_pretrained(merged)
    theirs = with_adapter.merge_and_unload()
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    for name in expected:
        assert state[name].dtype == expected[name].dtype, name
        assert torch.equal(state[name], expected[name]), name
    assert torch.equal(ours(ids).logits, theirs(ids).logits)

    again = {**tree, "lora": {"from": str(adapter)}, "train": {"steps": 1}}
    on = trained(
        config_of(tmp_path / "again", again),
    )
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"--adapter: .* trains the model itself"):
        export_weights(_full_run(tmp_path), out, None, form="adapter")
    begun = weights(on)
    assert begun.keys() == exact.keys()


def _full_run(tmp_path: Path) -> Path:
    return trained(
        config_of(
            tmp_path / "full",
            {
                "model": {"hf": {**LLAMA, "num_hidden_layers": 1}},
                "data": {"python": "tests.support.datasets:text"},
                "train": {"steps": 1},
            },
        )
    )


def test_in_and_out_without_a_step_the_bytes_are_the_same(base: Path, tmp_path: Path) -> None:
    """An adapter of PEFT's, gone on with for a step at a rate of nearly nothing, keeps its form."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    fields = {"r": 2, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    made = peft.get_peft_model(model, peft.LoraConfig(**fields))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    made.save_pretrained(tmp_path / "theirs")
    tree = {
        "model": {"hf": str(base), "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"from": str(tmp_path / "theirs")},
        "optimizer": {"name": "sgd", "lr": 1e-30, "weight_decay": 0.0},
        "train": {"steps": 1},
    }
    run_dir = trained(config_of(tmp_path / "run", tree))
    export_weights(run_dir, tmp_path / "ours", None, form="adapter")
    theirs, ours = (tmp_path / name / "adapter_model.safetensors" for name in ("theirs", "ours"))
    assert theirs.read_bytes() == ours.read_bytes()
    configs = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("theirs", "ours")
    ]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]
    export_weights(run_dir, tmp_path / "merged", None, form="merged")
    assert load_config(RunPaths(run_dir).config).lora == config_of(tmp_path / "run", tree).lora


def test_a_run_goes_on_without_the_adapter_it_began_from(base: Path, tmp_path: Path) -> None:
    """What it was is recorded; another `lora` section is refused."""
    tree = {
        "model": {"hf": str(base)},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"steps": 2},
    }
    whole = trained(config_of(tmp_path / "whole", {**tree, "train": {"steps": 4}}))
    first = config_of(tmp_path / "run", tree)
    train(first)
    longer = first.model_copy(update={"train": first.train.model_copy(update={"steps": 4})})
    train(longer)
    assert losses(longer.run.dir) == losses(whole)
    assert_same_bits(weights(longer.run.dir), weights(whole))
    other = config_of(tmp_path / "run", {**tree, "lora": {"r": 3, "target_modules": ["q_proj"]}})
    with pytest.raises(ConfigError, match=r"lora\.r: 2 -> 3"):
        train(other)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"init_lora_weights": "pissa"}, "pissa is not supported, which changes the base"),
        ({"init_lora_weights": "olora"}, "olora is not supported"),
        ({"init_lora_weights": "loftq"}, "loftq is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters is not supported"),
        ({"megatron_core": "os"}, r"lora\.megatron_core: unknown key"),
        ({"from": "x", "r": 3}, "from names an adapter"),
        ({"r": 0}, "must be 1 or more"),
    ],
)
def test_sections_that_are_refused(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_config(tmp_path, "llama", lora=section)


def test_a_new_adapter_names_its_base_and_what_it_is_for(base: Path, tmp_path: Path) -> None:
    """So PEFT's own classes load it; a directory of the hub's cache goes by its name there."""
    cached = tmp_path / "models--org--tiny" / "snapshots" / "0a1b"
    shutil.copytree(base, cached)
    tree = {
        "model": {"hf": str(cached)},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"steps": 1},
    }
    run_dir = trained(config_of(tmp_path / "run", tree))
    export_weights(run_dir, tmp_path / "out", None, form="adapter")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/tiny", "0a1b")
    assert config["task_type"] == "CAUSAL_LM"
    with pytest.raises(ConfigError, match=r"--adapter .*: it exists and is not empty"):
        export_weights(run_dir, tmp_path / "out", None, form="adapter")
    (cached / "model.safetensors").unlink()
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**UNTIED, "vocab_size": 60}))
    other.save_pretrained(cached)
    notes: list[str] = []
    export_weights(run_dir, tmp_path / "again", None, form="adapter", note=notes.append)
    assert any("not those that the run began from" in note for note in notes)
    (cached / "model.safetensors").rename(cached / "pytorch_model.bin")  # which is never read
    notes.clear()
    export_weights(run_dir, tmp_path / "third", None, form="adapter", note=notes.append)
    assert any("not those that the run began from" in note for note in notes)


def test_a_head_that_no_checkpoint_has_is_said_to_stay_as_drawn(tmp_path: Path) -> None:
    """Unless it is trained in full, by the names that PEFT gives for a task."""
    tree: dict[str, Any] = {
        "model": {
            "hf": str(saved(BERT, tmp_path / "base")),
            "architecture": "BertForSequenceClassification",
        },
        "data": {"python": "tests.support.datasets:labelled_text"},
        "lora": {"r": 2, "target_modules": ["query"]},
    }

    def said() -> str:
        notes: list[str] = []
        Prepared(config_of(tmp_path / "run", tree).resolved(), None, notes.append)
        return " ".join(notes)

    assert "lora.modules_to_save: [classifier]" in said()
    tree["lora"]["modules_to_save"] = ["classifier", "score"]
    assert "lora.modules_to_save: [classifier]" not in said()


def test_without_peft_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lora_config(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora needs PEFT: pip install 'swaptrain\[lora\]'"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_inspect_shows_base_and_adapter(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {
        "model": {"hf": str(base)},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "use_rslora": True},
        "train": {"steps": 1},
    }
    run_dir = trained(config_of(tmp_path / "run", tree))
    capsys.readouterr()
    inspect_run(run_dir)
    shown = capsys.readouterr().out
    assert "rsLoRA, r 4, scaled by 6 / sqrt(4), on 3 layers of the base" in shown
    assert str(base) in shown.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_modules": ["nothing"]}, r"lora: .*nothing.* not found"),
        ({"modules_to_save": ["lm_haed"]}, "no module lm_haed; the nearest are .*lm_head"),
        ({"modules_to_save": ["classifier", "score"]}, "has no module classifier; "),
    ],
)
def test_modules_that_are_not_there(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = lora_config(tmp_path, "llama", lora=section)
    for run in (train, plan):
        with pytest.raises(ConfigError, match=message):
            run(config)
    assert not (tmp_path / "run").exists()


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "of the kind 'IA3'"),
    ({"megatron_core": "evil", "megatron_config": {"a": 1}}, "sets megatron_co"),
    ({"init_lora_weights": "pissa"}, "pissa is not supported"),
    ({"target_parameters": ["experts"]}, "sets target_parameters"),
    ({"layer_replication": [[0, 1]]}, "sets layer_replication"),
    ({"r": "eight"}, r"adapter_config\.json: r"),
    ({"r": 3}, "has the shape"),
    ({"target_modules": ["o_proj"]}, "lacks .*o_proj"),
]


@pytest.mark.parametrize(("fields", "message"), HOSTILE)
def test_adapters_that_are_refused(
    fields: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    """A field that is not known by name reaches nobody; what does not fit is named."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    tree = {
        "model": {"hf": str(base)},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"from": str(tmp_path / "adapter")},
    }
    with pytest.raises(ConfigError, match=message):
        train(config_of(tmp_path / "run", tree))
    assert not (tmp_path / "run").exists()


def test_a_record_that_names_code_is_refused(base: Path, tmp_path: Path) -> None:
    """Of a run directory of somebody else: neither a start nor an export hands it to PEFT."""
    tree = {
        "model": {"hf": str(base)},
        "data": {"python": "tests.support.datasets:text"},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"steps": 1},
    }
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    root = read_root(run_dir)
    assert root is not None and root.adapter is not None
    hostile = {**root.adapter.fields, "megatron_core": "evil"}
    create_root(run_dir, _with_adapter(root, fields=hostile), tree=_tree(run_dir))
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})})
    with pytest.raises(ConfigError, match=r"the record of .*: megatron_core: Extra inputs"):
        train(longer)
    mapped = {**root.adapter.config, "auto_mapping": {"parent_library": "evil"}}
    create_root(run_dir, _with_adapter(root, config=mapped), tree=_tree(run_dir))
    with pytest.raises(DamagedStoreError, match="sets auto_mapping, which names code"):
        export_weights(run_dir, tmp_path / "out", None, form="adapter")
    assert not (tmp_path / "out").exists()


def _with_adapter(root: RootRecord, **fields: Any) -> RootRecord:
    assert root.adapter is not None
    return root.model_copy(update={"adapter": root.adapter.model_copy(update=fields)})


def _tree(run_dir: Path) -> str | None:
    return (run_dir / "store").readlink().name if (run_dir / "store").is_symlink() else None


def test_the_recorded_config_is_read_again(tmp_path: Path) -> None:
    config = lora_config(tmp_path, "llama", lora={"alpha_pattern": {"q_proj": 3}})
    path = tmp_path / "again.yaml"
    path.write_text(config.resolved_yaml())
    assert load_config(path) == config.resolved()


@pytest.mark.parametrize("kind", proof_but(["lora", "dora", "modules"], "lora"))
def test_a_base_of_large_tensors_stays_on_the_disk(kind: str, tmp_path: Path) -> None:
    """Of 16 KiB and more they are fake while the adapters are made: none is read for that.

    Nor is the model constructed anew in files of its own. The run has plain PEFT's bits.
    """
    fields = {**UNTIED, "hidden_size": 96, "intermediate_size": 128}
    base = saved(fields, tmp_path / "base")
    section: dict[str, Any] = {
        "lora": {"r": 4},
        "dora": {"r": 4, "use_dora": True},
        "modules": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }[kind]
    tree = {
        "model": {"hf": str(base)},
        "data": {"python": "tests.support.datasets:text"},
        "train": {"steps": 2},
        "lora": {"target_modules": "all-linear", **section},
    }
    config = config_of(tmp_path / "run", tree)
    construction = Prepared(config.resolved(), None, lambda _: None).built.initial.construction
    assert construction.recorded, construction.refusal
    run_dir = trained(config)
    data = open_data(config.data, seed=3, run_dir=tmp_path / "plain", model_vocabulary=64)
    fields_of_peft = config.lora.fields() if config.lora is not None else {}
    plain = train_reference(
        lambda: adapted(lambda: loaded(base), fields_of_peft, 3),
        data.batch,
        steps=2,
        micro_batches=3,
        seed=3,
        lr=1e-2,
        weight_decay=0.1,
    )
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)
