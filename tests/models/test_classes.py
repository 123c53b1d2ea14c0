"""The class that a job gets: asked what it sees, not taken by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor

from swaptrain.errors import CaptureError, ConfigError
from swaptrain.models.classes import Job, choose_class
from swaptrain.models.trials.leak import sight_of
from swaptrain.verbs.plan import plan
from tests.support.matrix import every
from tests.support.runs import config_of, losses, reference, trained

pytestmark = pytest.mark.trains

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
CAUSAL, MASKED = Job("causal"), Job("masked")
IDS = torch.zeros(2, 8, dtype=torch.long)
ONE = torch.zeros(2, dtype=torch.long)
PIXELS = torch.zeros(2, 3, 32, 32)


def items(*constants: str, **batch: Tensor) -> Job:
    return Job("items", lambda: batch, constants)


def config(model_type: str, **fields: Any) -> Any:
    cls = transformers.CONFIG_MAPPING[model_type]
    if model_type == "segformer":  # whose sizes are lists
        return cls()
    if model_type == "t5":
        fields = {"decoder_start_token_id": 0, "pad_token_id": 0, "d_kv": 8, **fields}
    known = cls().to_dict().keys() | cls.attribute_map.keys()
    return cls(**{k: v for k, v in {**SMALL, **fields}.items() if k in known or k in fields})


CHOSEN: list[tuple[str, dict[str, Any], Job, str]] = [
    ("llama", {}, CAUSAL, "LlamaForCausalLM"),
    ("gpt2", {}, CAUSAL, "GPT2LMHeadModel"),
    ("rwkv", {}, CAUSAL, "RwkvForCausalLM"),
    ("bert", {"is_decoder": True}, CAUSAL, "BertLMHeadModel"),
    ("electra", {"is_decoder": True}, CAUSAL, "ElectraForCausalLM"),
    ("bert", {}, MASKED, "BertForMaskedLM"),
    ("roberta", {}, MASKED, "RobertaForMaskedLM"),
    ("modernbert", {"pad_token_id": 0}, MASKED, "ModernBertForMaskedLM"),
    ("llama", {}, items(input_ids=IDS, labels=IDS), "LlamaForCausalLM"),
    ("llama", {}, items(input_ids=IDS, labels=ONE), "LlamaForSequenceClassification"),
    ("t5", {}, items(input_ids=IDS, labels=IDS), "T5ForConditionalGeneration"),
    ("bert", {}, items(input_ids=IDS, start_positions=ONE, end_positions=ONE),
     "BertForQuestionAnswering"),
    ("vit", {}, items(pixel_values=PIXELS, labels=ONE), "ViTForImageClassification"),
    ("segformer", {}, items(pixel_values=PIXELS, labels=torch.zeros(2, 32, 32).long()),
     "SegformerForSemanticSegmentation"),
    ("vit_mae", {}, items(pixel_values=PIXELS), "ViTMAEForPreTraining"),
    ("clip", {}, items("return_loss", pixel_values=PIXELS, input_ids=IDS), "CLIPModel"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "fields", "job", "expected"), CHOSEN, ids=[f"{c[0]} {c[3]}" for c in CHOSEN]
)
def test_the_class_that_fits_is_chosen(
    model_type: str, fields: dict[str, Any], job: Job, expected: str
) -> None:
    assert choose_class(config(model_type, **fields), None, [], job).__name__ == expected


REFUSED: list[tuple[str, str | None, list[str], Job, str]] = [
    ("bert", None, [], CAUSAL, "not causal.* is_decoder to true, with which BertLMHeadModel does"),
    ("roberta", None, [], CAUSAL, "not causal.*data.mask to 0.15 to train RobertaForMaskedLM"),
    ("electra", None, ["ElectraForCausalLM"], CAUSAL, "not causal"),
    ("camembert", "CamembertForCausalLM", [], CAUSAL, "not causal"),
    ("bert", "BertForMaskedLM", [], CAUSAL, "predicts each token where it sees it"),
    ("bart", None, [], CAUSAL, "no class of bart does that .it has BartForCausalLM"),
    ("bart", "BartForCausalLM", [], CAUSAL, "predicts each token where it sees it"),
    ("bart", None, ["BartForConditionalGeneration"], CAUSAL, "to predict|where it sees it"),
    ("t5", None, ["T5ForConditionalGeneration"], CAUSAL, "where it sees it|to predict"),
    ("mt5", None, [], CAUSAL, "no class of mt5 does that"),
    ("pegasus", "PegasusForCausalLM", [], CAUSAL, "where it sees it"),
    ("llama", "LlamaForTokenClassification", [], CAUSAL, "set model.architecture to LlamaForCaus"),
    ("llama", None, ["LlamaModel"], CAUSAL, "LlamaModel takes no .*labels.* to LlamaForCausalLM"),
    ("llama", None, ["MyOwnModel"], CAUSAL, "transformers has no MyOwnModel.*LlamaForCausalLM"),
    ("llama", "BertForMaskedLM", [], CAUSAL, "no class for model_type 'llama'"),
    ("llama", "AutoModel", [], CAUSAL, "no model class 'AutoModel'"),
    ("llama", None, [], MASKED, "no class of llama does that"),
    ("llama", "LlamaForCausalLM", [], MASKED, "shifts the labels"),
    ("t5", None, [], MASKED, "no class of t5 does that"),
    ("bert", None, [], items(input_ids=IDS, labels=IDS), "BertForMaskedLM or .*ForTokenClassif"),
    ("bert", None, [], items(input_ids=IDS, labels=ONE), "or BertForSequenceClassification"),
    ("bert", None, ["BertModel"], items(input_ids=IDS, labels=IDS), "has no argument labels.*arch"),
    ("llama", None, [], items(x=IDS), "rename the keys"),
]


@pytest.mark.parametrize(
    ("model_type", "named", "architectures", "job", "message"),
    every(4, REFUSED),
    ids=[f"{r[0]} {r[1] or r[2]} {r[3].kind}" for r in REFUSED],
)
def test_what_does_not_do_the_job_is_refused(
    model_type: str, named: str | None, architectures: list[str], job: Job, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_class(config(model_type), named, architectures, job)


def test_what_a_model_sees_is_what_its_logits_depend_on() -> None:
    """Against the logits themselves: before a changed token they stay, or they do not."""
    for cls, fields in [(transformers.BertLMHeadModel, {"is_decoder": d}) for d in (True, False)]:
        made = config("bert", **fields)
        torch.manual_seed(0)
        model = cls(made).eval()
        ids = torch.randint(3, 60, (1, 8))
        changed = ids.clone()
        changed[0, -1] = (ids[0, -1] + 1) % 60
        with torch.no_grad():
            before, after = (model(input_ids=i).logits[:, :-1] for i in (ids, changed))
        sight = sight_of(cls, made)
        assert sight is not None
        assert sight.itself == (not torch.equal(before, after))


def test_asking_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    sight_of(transformers.GPT2LMHeadModel, config("gpt2"))
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_of_billions_is_asked_in_a_small_one() -> None:
    big = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip
    sight = sight_of(transformers.LlamaForCausalLM, big)
    assert sight is not None and not sight.itself


CLIP: dict[str, Any] = {
    "model_type": "clip", "projection_dim": 16,
    "text_config": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
                    "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 63,
                    "max_position_embeddings": 16},
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "image_size": 32, "patch_size": 16},
}  # fmt: skip


@pytest.mark.proof
def test_a_constant_argument_trains_clip(tmp_path: Path) -> None:
    """Without return_loss it gives no loss, and the message names the key."""
    tree = {
        "model": {"hf": CLIP, "architecture": "CLIPModel"},
        "data": {"python": "tests.models.datasets:captions", "micro_batches": 2},
        "train": {"steps": 2, "seed": 3, "threads": 1},
    }
    with pytest.raises(CaptureError, match=r"takes return_loss.* in model.constants"):
        plan(config_of(tmp_path / "without", tree))
    tree["model"]["constants"] = {"return_loss": True}
    job = config_of(tmp_path / "run", tree)
    assert losses(trained(job)) == reference(job).losses
    tree["model"]["constants"] = {"return_los": True}
    with pytest.raises(CaptureError, match="did you mean 'return_loss'"):
        plan(config_of(tmp_path / "other", tree))


def test_a_decoder_that_sees_what_it_predicts_is_refused_by_the_command(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100)
    tree: dict[str, Any] = {
        "model": {"hf": {**SMALL, "model_type": "bert", "vocab_size": 300}},
        "data": {"text": [str(text)], "sequence_length": 16},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="it is not causal"):
        plan(config_of(tmp_path / "run", tree))
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["model"]
    assert not (tmp_path / "run").exists()
