"""Text from streamed weights: the tokens of transformers' `generate`, whatever the budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swaptrain.chat import render
from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.generate import Prompt, PromptCodec, Sampling, WeightStream
from swaptrain.generate import generation as generation_module
from swaptrain.store.read.live_store import LiveStore
from swaptrain.store.read.safetensors import StreamedTensor
from swaptrain.verbs import generate as generate_module
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.generate import generate_text
from tests.models.adapters.test_lora import GEMMA3
from tests.models.stored.test_pretrained import MIXTRAL, loaded, saved
from tests.models.test_resize import tokenizer
from tests.support.matrix import proof_but
from tests.support.runs import config_of, trained
from tests.whole.test_exactness import GPT2, LLAMA, T5

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
         "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "max_position_embeddings": 64},
    "gpt2": {**GPT2, "n_positions": 64},
    "gemma3": {**GEMMA3, "max_position_embeddings": 64},
    "mixtral": {**MIXTRAL, "max_position_embeddings": 64},
    "t5": {**T5, "eos_token_id": 62},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 2, **SMALL},
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0, **SMALL},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "olmo2": {"model_type": "olmo2", **SMALL},
    "mamba": {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "state_size": 4,
              "num_hidden_layers": 2},
}  # fmt: skip
PROMPTS = [Prompt("w1 w2 w3"), Prompt("w40 w41 w42 w43 w44 w45"), Prompt("w7")]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}

pytestmark = [
    pytest.mark.trains,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT's own
]


def run_of(tmp_path: Path, fields: dict[str, Any], **sections: Any) -> Config:
    """Train two steps from a saved model, with large changes."""
    base = saved(fields, tmp_path / "base")
    words = tokenizer(tmp_path / "words", 64)
    model = {"hf": str(base), **sections.pop("model", {})}
    data = {"python": "tests.support.datasets:text", "tokenizer": str(words)}
    tree = {"model": model, "data": data, "optimizer": {"lr": 3e-2}, "train": {"steps": 2}}
    config = config_of(tmp_path / "run", {**tree, **sections})
    trained(config)
    return config


def plain(directory: Path, words: Path, sampling: Sampling, device: str = "cpu") -> list[list[int]]:
    """Return the new tokens by transformers alone, end token included."""
    import transformers

    model: Any = loaded(directory).eval().to(device)
    codec = transformers.AutoTokenizer.from_pretrained(words, padding_side="left")
    seq2seq = model.config.is_encoder_decoder
    codec.padding_side = "right" if seq2seq else "left"
    codec.pad_token = codec.eos_token
    batch = codec([prompt.text for prompt in PROMPTS], return_tensors="pt", padding=True)
    torch.manual_seed(sampling.seed)
    model.generation_config.eos_token_id = model.generation_config.eos_token_id or 63
    batch = batch.to(device)
    arguments = {"attention_mask": batch.attention_mask, "pad_token_id": 63, "use_cache": True}
    found = model.generate(batch.input_ids, **arguments, **sampling.arguments())
    begin = 1 if seq2seq else batch.input_ids.shape[1]
    ends = model.generation_config.eos_token_id
    rows = []
    for row in found[:, begin:].tolist():
        place = next((i for i, token in enumerate(row) if token in (ends, [ends])), len(row) - 1)
        rows.append(row[: place + 1])
    return rows


def half(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[WeightStream]:
    """Leave less memory than the weights take; returns the streams that are made."""
    made: list[WeightStream] = []

    class Tight(WeightStream):
        def __init__(self, module: nn.Module, stored: Any, **rest: Any) -> None:
            sizes = [p.numel() * p.element_size() for p in module.parameters()]
            rest["budget_bytes"] = max(3 * max(sizes) + 4096, sum(sizes) // 2)
            rest["device_bytes"] = rest["budget_bytes"] if rest["device_bytes"] else 0
            super().__init__(module, stored, **rest)
            made.append(self)

    monkeypatch.setattr(generate_module, "WeightStream", Tight)
    return made


@pytest.mark.parametrize(
    "name", proof_but(MODELS, "t5", "mixtral", whole=("qwen3", "phi3", "gpt_neox", "olmo2"))
)
def test_the_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch of unequal prompts, with less memory than the weights take."""
    config = run_of(tmp_path, MODELS[name])
    export_weights(config.run.dir, tmp_path / "out", None)
    sampling = Sampling(max_new_tokens=12)
    expected = plain(tmp_path / "out", tmp_path / "words", sampling)
    streams = half(config, monkeypatch)
    found = generate_text(config, PROMPTS, sampling)
    assert [row.tolist() for row in found.tokens] == expected
    assert streams[0].read_bytes >= streams[0].total_bytes
    assert any(len(row) > 3 for row in expected)


def test_draws_are_those_of_transformers(tmp_path: Path) -> None:
    """With the same seed; another one gives other tokens."""
    config = run_of(tmp_path, MODELS["llama"])
    export_weights(config.run.dir, tmp_path / "out", None)
    sampling = Sampling(max_new_tokens=12, temperature=1.5, top_p=0.95, top_k=50, seed=3)
    expected = plain(tmp_path / "out", tmp_path / "words", sampling)
    assert [row.tolist() for row in generate_text(config, PROMPTS, sampling).tokens] == expected
    other = Sampling(max_new_tokens=12, temperature=1.5, top_p=0.95, top_k=50, seed=4)
    assert [row.tolist() for row in generate_text(config, PROMPTS, other).tokens] != expected


@pytest.mark.parametrize(
    ("base", "dora"),
    proof_but(
        [("nf4", True), (None, False), ("nf4", False), (None, True)],
        ("nf4", True),
        whole=[("nf4", False), (None, True)],
    ),
)
def test_with_adapters_it_is_the_merged_model(
    base: str | None, dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding: the merge adds before the product, the adapter after it."""
    fields = {**MODELS["llama"], "tie_word_embeddings": False}
    config = run_of(tmp_path, fields, model={"base": base}, lora={**LORA, "use_dora": dora})
    export_weights(config.run.dir, tmp_path / "out", None, form="merged")
    sampling = Sampling(max_new_tokens=8)
    expected = plain(tmp_path / "out", tmp_path / "words", sampling)
    half(config, monkeypatch)
    assert [row.tolist() for row in generate_text(config, PROMPTS, sampling).tokens] == expected


def test_bfloat16_and_a_snapshot(tmp_path: Path) -> None:
    """A run in bfloat16 computes in it; a snapshot's weights are another step's."""
    keep = {"store": {"keep": {"every": 1, "last": 2}}}
    config = run_of(tmp_path, MODELS["llama"], model={"dtype": "bfloat16"}, **keep)
    said: list[str] = []
    sampling = Sampling(max_new_tokens=12)
    last = generate_text(config, PROMPTS, sampling, note=said.append)
    first = generate_text(config, PROMPTS, sampling, from_step=1, note=said.append)
    assert said[0].startswith("step 2: ") and said[1].startswith("step 1: ")
    assert [row.tolist() for row in last.tokens] != [row.tolist() for row in first.tokens]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt is written as it comes; several are JSON Lines; a conversation by the template."""
    config = run_of(tmp_path, MODELS["llama"])
    words = Path(config.data.tokenizer)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}w9"
    words.joinpath("chat_template.jinja").write_text(template)
    run = str(config.run.dir)
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "w1 w2", "--max-new-tokens", "6"]) == 0
    written = capsys.readouterr()
    [expected] = generate_text(config, [Prompt("w1 w2")], Sampling(6)).texts
    assert written.out.split() == expected.split()
    assert "bounds it" in written.err
    rows = [{"prompt": "w1 w2"}, {"messages": [{"role": "user", "content": "w5"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "6"]
    assert main(["generate", run, *arguments]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in found] == ["w1 w2", rows[1]["messages"]]
    assert main(["generate", run, "--prompt", "w5", "--chat", "--max-new-tokens", "6"]) == 0
    chat = capsys.readouterr().out.split()
    [alone] = generate_text(config, [Prompt("w5 w9")], Sampling(6)).texts
    assert chat == alone.split()


def test_a_store_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is made again, and nothing of it is written twice; nor are rows."""
    config = run_of(tmp_path, MODELS["llama"])
    arguments = ["generate", str(config.run.dir), "--max-new-tokens", "8"]
    (tmp_path / "p.txt").write_text("w1 w2\nw3\n")
    several = [*arguments, "--prompts", str(tmp_path / "p.txt")]
    capsys.readouterr()
    assert main([*arguments, "--prompt", "w1 w2"]) == main(several) == 0
    expected = capsys.readouterr().out
    looks = generation_module._Finite.__call__
    calls: list[int] = []

    def fails_once(guard: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(guard.calls)
        if len(calls) == 6:
            raise DamagedStoreError("a chunk does not match", segment=1)
        return looks(guard, ids, scores)

    monkeypatch.setattr(LiveStore, "has_changed", lambda _: True)
    monkeypatch.setattr(generation_module._Finite, "__call__", fails_once)
    assert main([*arguments, "--prompt", "w1 w2"]) == 0
    assert calls[:7] == [0, 1, 2, 3, 4, 5, 0]
    calls.clear()
    assert main(several) == 0
    assert calls[:7] == [0, 1, 2, 3, 4, 5, 0]
    assert capsys.readouterr().out == expected


def test_a_template_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped by the limits that rows of data have."""
    words = tokenizer(tmp_path / "words", 64)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    words.joinpath("chat_template.jinja").write_text(loop)
    monkeypatch.setattr(render.render_prompts, "__kwdefaults__", {"most_row_s": 1, "most_all_s": 9})
    config = config_of(tmp_path / "run", {"model": {"hf": LLAMA}, "data": {"text": ["a.txt"]}})
    codec = PromptCodec(config, is_chat=True, tokenizer=words)
    with pytest.raises(ConfigError, match=r"cannot be written: it takes more than 1 s: does the"):
        codec.encode([Prompt("w1")], left=True)


REFUSALS: dict[str, tuple[list[str], str]] = {
    "nothing to write": (["RUN"], "one of --prompt TEXT and --prompts"),
    "no run": (["--prompt", "w1"], "one of RUN and --config"),
    "no tokens": (["RUN", "--prompt", "w1", "--max-new-tokens", "0"], "give 1 or more"),
    "cold": (["RUN", "--prompt", "w1", "--temperature", "0"], "give a number above 0"),
    "more than all": (["RUN", "--prompt", "w1", "--top-p", "1.5"], "at most 1"),
    "empty": (["RUN", "--prompt", ""], "a prompt is empty"),
    "too long": (["RUN", "--prompt", "w1", "--max-new-tokens", "64"], "the model has 64 positions"),
    "no snapshot": (["RUN", "--prompt", "w1", "--from-step", "1"], "has no snapshot of it"),
    "no tokenizer": (
        ["RUN", "--prompt", "w1", "--tokenizer", "/none"],
        "/none/tokenizer.json is not usable",
    ),
    "no template": (["RUN", "--prompt", "w1", "--chat"], "needs a chat template"),
    "keys over a record": (["RUN", "--prompt", "w1", "--set", "a=1"], "give --config FILE"),
    "no file": (["RUN", "--prompts", "/none.txt"], "cannot be read"),
    "half a pair": (["RUN", "--prompt", "w1 \ud800"], "which is no character"),
    "a larger tokenizer": (
        ["RUN", "--prompt", "w69", "--max-new-tokens", "2", "--tokenizer", "LARGE"],
        "has the id 69",
    ),
}


def test_what_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and one line."""
    run = str(run_of(tmp_path, MODELS["llama"]).run.dir)
    words = {"RUN": run, "LARGE": str(tokenizer(tmp_path / "large", 71))}
    for arguments, message in REFUSALS.values():
        capsys.readouterr()
        given = [words.get(word, word) for word in arguments]
        assert main(["generate", *given]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said


def test_a_run_is_the_one_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy is read where it lies; another model than the run's is refused, key by key."""
    config = run_of(tmp_path, MODELS["llama"], train={"steps": 1})
    copy = tmp_path / "copy"
    shutil.copytree(config.run.dir, copy, symlinks=True)
    run_of(tmp_path, MODELS["llama"])  # goes on
    sampling = Sampling(12)
    said: list[str] = []
    generate_text(generate_module.recorded(copy), PROMPTS, sampling, note=said.append)
    generate_text(generate_module.recorded(config.run.dir), PROMPTS, sampling, note=said.append)
    assert [line.partition(":")[0] for line in said] == ["step 1", "step 2"]
    other = config.model.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"model\.dtype: float32 -> bfloat16"):
        generate_text(config.model_copy(update={"model": other}), PROMPTS, sampling)


def test_a_model_that_is_code_or_writes_nothing(tmp_path: Path) -> None:
    """Code is not taken from a run directory; a classifier has no next token."""
    tree = {"model": {"python": "tests.support.models:gpt"}, "train": {"steps": 1}}
    config = config_of(
        tmp_path / "gpt", {**tree, "data": {"python": "tests.support.datasets:tokens"}}
    )
    trained(config)
    with pytest.raises(ConfigError, match=r"code is not taken from a run directory"):
        generate_module.recorded(config.run.dir)
    with pytest.raises(ConfigError, match=r"no tokenizer is known"):
        generate_text(config, PROMPTS, Sampling(4))
    words = tokenizer(tmp_path / "words", 64)
    with pytest.raises(ConfigError, match=r"writes no text"):
        generate_text(config, PROMPTS, Sampling(4), tokenizer=words)


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    """Says what one module takes."""
    config = run_of(tmp_path, MODELS["llama"])
    memory = config.memory.model_copy(update={"host": 20_000})
    with pytest.raises(ConfigError, match=r"memory\.host: .* are left for weights"):
        generate_text(config.model_copy(update={"memory": memory}), PROMPTS, Sampling(4))


class _Reaches(nn.Module):
    """Reads a weight of a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.rest = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called: torch.Tensor = self.outer(x)
        assert self.inner.weight.shape[0] == len(self.inner.bias) == 4
        read = nn.functional.linear(x, weight=self.inner.weight.data.T, bias=self.inner.bias)
        return torch.cat([called, self.rest(read) * self.inner.bias])


def stream_of(module: nn.Module, weights: dict[str, torch.Tensor], budget: int) -> WeightStream:
    tensors = {
        name: StreamedTensor(name, "float32", tuple(t.shape), t.numel() * 4, [t.numpy()])
        for name, t in weights.items()
    }
    device = torch.device("cpu")
    return WeightStream(module, {"float32": tensors}, budget_bytes=budget, device=device)


def test_a_weight_that_is_read_without_a_call() -> None:
    """It comes all the same; its shape is known without."""
    module = _Reaches()
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = module(x)
        with stream_of(module, weights, 239) as stream:
            assert all(torch.equal(module(x), expected) for _ in range(3))
            assert stream.held_bytes == 0
    finite = generation_module._Finite()
    with pytest.raises(RunError, match="the scores of a token are NaN"):
        finite(torch.zeros(1), torch.tensor([torch.nan]))


def test_modules_in_another_order_every_time() -> None:
    """What was read ahead for nothing goes; tied weights are held once."""
    module = nn.ModuleDict({f"m{i}": nn.Linear(8, 8, bias=False) for i in range(6)})
    module["m5"].weight = module["m0"].weight
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    plain_weights = dict(weights) | {"m5.weight": weights["m0.weight"]}
    x = torch.randn(3, 8)
    with torch.no_grad(), stream_of(module, weights, 4 * 256) as stream:
        assert stream.total_bytes == 5 * 256
        for number in (int(digit) for digit in "012345543210220551403125"):
            expected = x @ plain_weights[f"m{number}.weight"].T
            assert torch.equal(module[f"m{number}"](x), expected)
        assert stream.held_bytes == 2 * 256


def test_a_streamer_asks_for_one_token_too(tmp_path: Path) -> None:
    """After the end of a line."""
    data = {"text": [str(tmp_path / "a.txt")], "tokenizer": "bytes"}
    codec = PromptCodec(config_of(tmp_path / "run", {"model": {"hf": LLAMA}, "data": data}))
    assert [codec.decode(ids) for ids in (97, [97, 10], torch.tensor([98, 256]))] == [
        "a",
        "a\n",
        "b",
    ]
