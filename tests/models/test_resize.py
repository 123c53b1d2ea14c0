"""A vocabulary that grows to its tokenizer's: the bits of `resize_token_embeddings`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from swaptrain.errors import ConfigError
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.plan import plan
from tests.models.stored.test_pretrained import MODELS, loaded, saved
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, trained, weights

BART: dict[str, Any] = {
    "model_type": "bart", "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 1,
    "architectures": ["BartForConditionalGeneration"],
}  # fmt: skip
GROWING = [name for name in MODELS if name != "resnet"]
DORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "use_dora": True}

pytestmark = [
    pytest.mark.trains,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT's own
]


def tokenizer(directory: Path, size: int) -> Path:
    """Write a tokenizer of so many words."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size - 1)} | {"e": size - 1}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="e")
    made.save_pretrained(directory)
    return directory


def tree(base: Path | dict[str, Any], data: str, words: Path, **sections: Any) -> dict[str, Any]:
    model = {"hf": str(base) if isinstance(base, Path) else base, "resize_to_tokenizer": True}
    train = {"steps": 0, "seed": 5, **sections.pop("train", {})}
    tokens = {"python": data, "tokenizer": str(words)}
    return {"model": model, "data": tokens, "train": train, **sections}


@pytest.mark.parametrize("name", proof_but(GROWING, "llama", "bert", whole=GROWING[-2:]))
def test_the_new_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """After the seed, on the weights of the checkpoint; two steps later they are another's."""
    fields, data = MODELS[name]
    base, words = saved(fields, tmp_path / "base"), tokenizer(tmp_path / "words", 71)
    plain = loaded(base)
    torch.manual_seed(5)
    plain.resize_token_embeddings(71)
    expected = {n: p.detach() for n, p in plain.named_parameters()}
    start = trained(config_of(tmp_path / "start", tree(base, data, words)))
    assert_same_bits(weights(start), expected)

    def steps(count: int) -> Path:
        sections = tree(base, data, words, train={"steps": count})
        return trained(config_of(tmp_path / "run", sections))

    steps(1)
    run_dir = steps(2)  # goes on without the checkpoint
    out = tmp_path / "out"
    export_weights(run_dir, out, None)
    again = loaded(out)
    assert again.get_input_embeddings().num_embeddings == 71
    exact = weights(run_dir)
    assert_same_bits(exact, {n: again.state_dict()[n] for n in exact})
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == 71


def test_what_an_architecture_draws_grows_too(tmp_path: Path) -> None:
    """Without a checkpoint: the constructor's rows, and the seed again before the new ones."""
    fields, data = MODELS["llama"]
    words = tokenizer(tmp_path / "words", 71)
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(5)
    plain = transformers.LlamaForCausalLM(config)
    torch.manual_seed(5)
    plain.resize_token_embeddings(71)
    start = trained(config_of(tmp_path / "run", tree(fields, data, words)))
    assert_same_bits(weights(start), {n: p.detach() for n, p in plain.named_parameters()})


def test_adapters_on_a_vocabulary_that_grew(tmp_path: Path) -> None:
    """The merged directory has the rows too, and PEFT loads the adapter on a grown model."""
    fields, data = MODELS["llama"]
    base, words = saved(fields, tmp_path / "base"), tokenizer(tmp_path / "words", 71)
    sections = tree(base, data, words, lora=DORA, train={"steps": 2})
    run_dir = trained(config_of(tmp_path / "run", sections))
    plain = loaded(base)
    torch.manual_seed(5)
    plain.resize_token_embeddings(71)
    torch.manual_seed(5)
    adapted = get_peft_model(plain, LoraConfig(**DORA))
    ours = weights(run_dir)
    for name, parameter in adapted.base_model.model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(ours[name], parameter), name
    merged = tmp_path / "merged"
    export_weights(run_dir, merged, None, form="merged")
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == 71
    export_weights(run_dir, tmp_path / "adapter", None, form="adapter")
    fresh = loaded(base)
    torch.manual_seed(5)
    fresh.resize_token_embeddings(71)
    again = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter")).merge_and_unload()
    assert_same_bits(dict(loaded(merged).state_dict()), dict(again.state_dict()))
    on = {"lora": {"from": str(tmp_path / "adapter")}, "train": {"steps": 1}}
    trained(config_of(tmp_path / "on", tree(base, data, words, **on)))


def test_a_vocabulary_does_not_shrink(tmp_path: Path) -> None:
    """A table with rows to spare stays as it is."""
    fields, data = MODELS["llama"]
    words = tokenizer(tmp_path / "words", 60)
    run_dir = trained(config_of(tmp_path / "run", tree(fields, data, words)))
    assert len(weights(run_dir)["model.embed_tokens.weight"]) == fields["vocab_size"]


def test_what_cannot_grow_is_refused(tmp_path: Path) -> None:
    """No tokenizer to grow to, a model without a vocabulary, a function, and bytes."""
    fields, data = MODELS["llama"]
    missing = tree(fields, data, tmp_path / "none")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*none.* is not usable"):
        plan(config_of(tmp_path / "a", missing))
    resnet, pictures = MODELS["resnet"]
    words = tokenizer(tmp_path / "words", 71)
    with pytest.raises(ConfigError, match="a resnet has no vocab_size"):
        plan(config_of(tmp_path / "b", tree(resnet, pictures, words)))
    with pytest.raises(ConfigError, match=r"resize_to_tokenizer needs data\.tokenizer"):
        config_of(tmp_path / "c", {**missing, "data": {"python": data}})
    with pytest.raises(ConfigError, match="resize_to_tokenizer belongs to hf"):
        model = {"python": "tests.support.models:gpt", "resize_to_tokenizer": True}
        config_of(tmp_path / "d", {**missing, "model": model})


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_a_buffer_that_grows(value: float, tmp_path: Path) -> None:
    """BART's final_logits_bias is made anew, of zeros: a checkpoint's own is not lost."""
    base, words = saved(BART, tmp_path / "base"), tokenizer(tmp_path / "words", 71)
    file = base / "model.safetensors"
    held = load_file(file)
    held["final_logits_bias"] = torch.full((1, 64), value)
    save_file(held, file, metadata={"format": "pt"})
    config = config_of(tmp_path / "run", tree(base, "tests.support.datasets:text", words))
    if value:
        with pytest.raises(ConfigError, match=r"the buffer final_logits_bias anew"):
            trained(config)
        return
    plain = loaded(base)
    torch.manual_seed(5)
    plain.resize_token_embeddings(71)
    expected = {n: t.detach() for n, t in plain.state_dict().items()}
    found = weights(trained(config))
    assert_same_bits(found, {n: expected[n] for n in found})
    assert found["final_logits_bias"].shape == (1, 71)
