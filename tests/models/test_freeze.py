"""`train.freeze`: the same bits as plain PyTorch with these parameters frozen, and less work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError
from swaptrain.models.freeze import freeze
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Operation
from swaptrain.verbs.plan import plan
from swaptrain.verbs.train import train
from tests.support.matrix import matrix
from tests.support.plain import PlainRuns
from tests.support.runs import assert_same_state, config_of, losses, norms, trained, weights
from tests.whole.test_exactness import GPT2, LLAMA, MODELS, T5

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "lower half": ({"hf": {**LLAMA, "tie_word_embeddings": False}}, "text",
                   ["model.embed_tokens*", "model.layers.[01].*"]),
    "norms only": ({"hf": LLAMA}, "text", ["*proj.weight", "model.embed_tokens.weight"]),
    "head only": ({"hf": GPT2}, "text", ["lm_head.*", "transformer.wpe.weight"]),
    "encoder": ({"hf": T5}, "text", ["encoder.*"]),
    "batch norm below": (MODELS["convolutional"][0], "image_labels", ["first.*", "norms.*"]),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputing": {"memory": {"segment": "4KiB"}, "train": {"recompute": True}},
    "saving": {"memory": {"segment": "4KiB"}, "train": {"recompute": False}},
    "clipped": {"memory": {"segment": "16KiB"}, "optimizer": {"clip_norm": 0.3}},
    "bfloat16": {"memory": {"segment": "4KiB"}, "model": {"dtype": "bfloat16"}},
}


def _config(tmp_path: Path, case: str, **tree: Any) -> Any:
    model, data, patterns = CASES[case]
    return config_of(
        tmp_path / "run",
        {
            **tree,
            "model": {**model, **tree.get("model", {})},
            "data": {"python": f"tests.support.datasets:{data}"},
            "train": {"freeze": patterns, **tree.get("train", {})},
        },
    )


@pytest.mark.trains
@pytest.mark.parametrize(("case", "variant"), matrix(CASES, VARIANTS, by_pairs=False))
def test_the_same_bits_as_plain_pytorch(
    case: str, variant: str, tmp_path: Path, plain_runs: PlainRuns
) -> None:
    config = _config(tmp_path, case, **VARIANTS[variant])
    run_dir = trained(config)
    plain = plain_runs.of(config)
    assert losses(run_dir) == plain.losses
    if variant != "bfloat16":
        assert norms(run_dir) == plain.grad_norms
    assert_same_state(weights(run_dir), plain)


@pytest.mark.trains
def test_what_is_frozen_has_no_state_and_the_backward_stops(tmp_path: Path) -> None:
    """Nothing runs twice below the lowest learner."""
    config = _config(tmp_path, "lower half", memory={"segment": "4KiB"})
    made = Prepared(config.resolved(), None, lambda _: None, draw=False).plan
    segments = made.captured.model.segments
    first = next(s.index for s in segments if any("layers.2." in name for name in s.owns))
    assert first > 3
    backwards = {
        i.segment for i in made.step if i.operation in (Operation.BACKWARD, Operation.TURN)
    }
    assert backwards == set(range(first, len(segments) + 1))
    assert set(made.layouts.state) <= backwards
    assert {i.segment for i in made.step if i.operation is Operation.FORWARD} == set(
        range(1, len(segments))
    )


@pytest.mark.trains
def test_the_plan_counts_what_is_only_read(tmp_path: Path) -> None:
    whole = plan(_config(tmp_path, "lower half", train={"freeze": None}))
    frozen = plan(_config(tmp_path, "lower half"))
    assert "frozen by train.freeze: model.embed_tokens.weight" in frozen.trained
    assert frozen.step_write_bytes < whole.step_write_bytes / 1.5
    state, full = (sum(s.state_bytes for s in report.segments) for report in (frozen, whole))
    assert state < full


@pytest.mark.trains
@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["model.embed*", "model.layer.1*"], r"'model\.layer\.1\*' matches no parameter; the near"),
        (["*"], "'\\*' freeze all .* parameters, and nothing is left to train"),
    ],
)
def test_patterns_that_are_refused(patterns: list[str], message: str, tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run",
        {
            "model": {"hf": LLAMA},
            "data": {"python": "tests.support.datasets:text"},
            "train": {"freeze": patterns},
        },
    )
    with pytest.raises(ConfigError, match=message):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_tied_weight_is_frozen_by_any_of_its_names() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    freeze(module, ["b.weight"])
    assert [n for n, p in module.named_parameters() if p.requires_grad] == ["a.bias", "b.bias"]
    freeze(module, ["c.*"], all_match=False)


def test_it_cannot_change(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run", {"model": {"hf": LLAMA}, "data": {"text": ["x"]}, "train": {}}
    )
    text = config.resolved_yaml()
    assert "freeze: null" in text and load_config(_written(tmp_path, text)) == config.resolved()


def _written(directory: Path, text: str) -> Path:
    path = directory / "written.yaml"
    path.write_text(text)
    return path
