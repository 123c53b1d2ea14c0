"""A model in memory that is not what its config builds is refused, and so is another one later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import swaptrain.hf
from swaptrain.errors import ConfigError
from swaptrain.hf.unchanged import check_unchanged
from tests.hf.test_train import SMALL
from tests.hf.tiny import arguments, items, llama

pytestmark = pytest.mark.trains


def _head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 10)


def _eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.1


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def _of_parameter(model: Any) -> None:
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)


def _tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(lambda self, x: x, mlp)


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def _more(model: Any) -> None:
    model.adapter = nn.Linear(2, 2)


CHANGES = {
    _head: r"lm_head\.out_features is 10, not 61",
    _eps: r"model\.norm\.variance_epsilon is 0\.1, not 1e-06",
    _hook: r"model\.layers\.0 has hooks",
    _of_parameter: r"lm_head\.weight has hooks",
    _tie: r"other tensors are one: lm_head\.weight=model\.embed_tokens\.weight",
    _forward: r"model\.layers\.1\.mlp\.forward is _forward",
    _activation: r"model\.layers\.1\.mlp\.act_fn is GELU, not SiLU",
    _more: "adapter is new",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_is_named(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """What the directory would not keep; and nothing is written."""
    model = llama()
    change(model)
    with pytest.raises(ConfigError, match=CHANGES[change]):
        swaptrain.hf.train(model, arguments(tmp_path / "a", max_steps=1), items(4), **SMALL)
    assert not (tmp_path / "a").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers has another way by now
def test_what_changes_no_number_is_taken() -> None:
    """Recomputing, its hook, modes, and a tie that is the config's."""
    model, built = llama(), llama()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.eval()
    check_unchanged(model, built)


def test_another_config_is_another_run(tmp_path: Path) -> None:
    """Of the same weights; `accept_change` takes other arguments."""
    args = arguments(tmp_path / "a", max_steps=1)
    swaptrain.hf.train(llama(), args, items(4), **SMALL)
    other = llama()
    other.config.rms_norm_eps = 1e-3
    changed = type(other)(other.config)
    changed.load_state_dict(other.state_dict())
    with pytest.raises(ConfigError, match="model has other config than the run"):
        swaptrain.hf.train(changed, args, items(4), **SMALL)
    more: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-3}
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        swaptrain.hf.train(llama(), arguments(tmp_path / "a", **more), items(4), **SMALL)
    args = arguments(tmp_path / "a", **more)
    assert swaptrain.hf.train(llama(), args, items(4), accept_change=True, **SMALL).step == 2
    data = items(4)
    data[0] = {"input_ids": data[0]["input_ids"], "labels": torch.full((12,), -100)}
    args = arguments(tmp_path / "a", **{**more, "max_steps": 3})
    with pytest.raises(ConfigError, match="has other values in labels"):
        swaptrain.hf.train(llama(), args, data, accept_change=True, **SMALL)
