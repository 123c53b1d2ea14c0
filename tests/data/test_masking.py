"""Masked-language items: the recipe, what is never hidden, and that a resume hides the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.data import open_data, open_eval, open_example
from swaptrain.data.batches import Batches
from swaptrain.errors import ConfigError
from tests.support.runs import config_of, losses, reference, trained

WORDS = [f"w{i}" for i in range(100)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
PAD, MASK, END = 0, 4, 5


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    named = {"eos_token": "</s>", "mask_token": {"content": "[MASK]"}, "pad_token": "[PAD]",
             "unk_token": "[UNK]", "additional_special_tokens": ["[CLS]", "[SEP]"]}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def config(tmp_path: Path, tokenizer: Path | str, data: dict[str, Any] | None = None) -> Config:
    text = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    if not text.exists():
        numbers = torch.randint(0, 90, (8000,), generator=generator).tolist()
        text.write_text(" ".join(f"w{i}" for i in numbers) + " unknown words here")
    tree = {
        "model": {"hf": {"model_type": "bert"}},
        "data": {"text": [str(text)], "tokenizer": str(tokenizer), "mask": 0.15,
                 "sequence_length": 40, "micro_batch": 10, "micro_batches": 2, **(data or {})},
        "eval": {"text": [str(text)], "every": 1},
        "train": {"steps": 1},
        "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path, ())


def opened(made: Config, seed: int = 0) -> Batches:
    return open_data(made.data, seed=seed, run_dir=made.run.dir, model_vocabulary=None)


def gathered(batches: Batches, steps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    found = [batches.batch(step, m) for step in steps for m in range(2)]
    return (
        torch.cat([batch["input_ids"] for batch in found]),
        torch.cat([batch["labels"] for batch in found]),
    )


def test_the_recipe_is_berts(tmp_path: Path, tokenizer: Path) -> None:
    """15 % of the tokens are chosen; 80 % of them masked, 10 % random, 10 % as they are."""
    ids, labels = gathered(opened(config(tmp_path, tokenizer)), range(1, 60))
    chosen = labels != -100
    assert chosen.sum(dim=1).unique().tolist() == [6]  # of 40, by round(0.15 * 40)
    seen, hidden = ids[chosen], labels[chosen]
    masked, kept = seen == MASK, seen == hidden
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.02)
    other = seen[~masked & ~kept]
    assert (other >= len(SPECIAL)).all() and len(other.unique()) > 60
    assert torch.equal(torch.where(chosen, labels, ids) >= 0, torch.ones_like(chosen))


def test_what_is_not_chosen_is_the_text(tmp_path: Path, tokenizer: Path) -> None:
    made = config(tmp_path, tokenizer)
    ids, labels = gathered(opened(made), [1])
    plain, _ = gathered(opened(config(tmp_path, tokenizer, {"mask": None})), [1])
    assert torch.equal(torch.where(labels == -100, ids, labels), plain)


def test_special_tokens_are_never_hidden(tmp_path: Path, tokenizer: Path) -> None:
    for number in range(30):
        (tmp_path / f"short{number}.txt").write_text("w1 w2 unknown w3")
    data = {"text": [str(tmp_path / "short*.txt")], "sequence_length": 10, "shuffle": False,
            "micro_batch": 5, "mask": 0.9}  # fmt: skip
    ids, labels = gathered(opened(config(tmp_path, tokenizer, data)), [1])
    plain, _ = gathered(opened(config(tmp_path, tokenizer, {**data, "mask": None})), [1])
    special = plain < len(SPECIAL)
    assert special.any() and torch.equal(ids[special], plain[special])
    assert (labels[special] == -100).all()


def test_masks_follow_seed_epoch_and_item(tmp_path: Path, tokenizer: Path) -> None:
    """Another epoch and another seed hide others; the same again hide the same."""
    made = config(tmp_path, tokenizer, {"shuffle": False, "micro_batch": 100})
    batches = opened(made)
    first, again = batches.batch(1, 0), opened(made).batch(1, 0)
    assert torch.equal(first["labels"], again["labels"])
    assert torch.equal(first["input_ids"], again["input_ids"])
    later = batches.batch(2, 0)  # 200 items: the second epoch
    assert not torch.equal(first["labels"], later["labels"])
    assert not torch.equal(first["labels"], opened(made, seed=1).batch(1, 0)["labels"])


def test_held_out_data_has_fixed_masks(tmp_path: Path, tokenizer: Path) -> None:
    made = config(tmp_path, tokenizer)
    assert made.eval is not None
    found = [
        open_eval(made.eval, made.data, run_dir=made.run.dir, model_vocabulary=None).batch(1, 0)
        for _ in range(2)
    ]
    assert torch.equal(found[0]["labels"], found[1]["labels"])
    assert (found[0]["labels"] == -100).any()


def test_without_a_mask_token_it_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    made = config(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match="has no mask token"):
        open_example(made.data, model_vocabulary=None)
    with pytest.raises(ConfigError, match="tokenizer is bytes, which has none"):
        config(tmp_path, "bytes")
    for wrong in (0.0, 1.0, -0.1, True):
        with pytest.raises(ConfigError, match=r"data\.mask"):
            config(tmp_path, tokenizer, {"mask": wrong})


def test_token_files_take_the_tokenizer_that_made_them(tmp_path: Path, tokenizer: Path) -> None:
    import numpy as np

    np.save(tmp_path / "ids.npy", np.arange(6, 106, dtype=np.uint16).repeat(20))
    data = {"text": None, "tokens": [str(tmp_path / "ids.npy")]}
    ids, labels = gathered(opened(config(tmp_path, tokenizer, data)), [1])
    assert ((labels != -100).sum(dim=1) == 6).all() and (ids == MASK).any()


@pytest.mark.proof
def test_a_masked_run_is_plain_pytorchs_over_a_resume(tmp_path: Path, tokenizer: Path) -> None:
    """BertForMaskedLM is chosen for it; losses and held-out losses are those of the plain loop."""
    bert = {
        "model_type": "bert", "vocab_size": 106, "hidden_size": 16, "num_hidden_layers": 1,
        "intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    data = config(tmp_path, tokenizer, {"micro_batch": 50}).to_tree()["data"]
    tree = {
        "model": {"hf": bert}, "data": data, "store": {"commit": {"lag": 1}},
        "train": {"steps": 2, "seed": 3, "threads": 1},
    }  # fmt: skip
    job = config_of(tmp_path / "run", tree)
    trained(job)
    more = job.model_copy(update={"train": job.train.model_copy(update={"steps": 5})})
    plain = reference(job.resolved().model_copy(update={"train": more.train}))
    assert losses(trained(more)) == plain.losses  # two epochs and a half, of 200 items each
