"""`train.skip_ignored`: the bits of plain PyTorch whose forward leaves the ignored rows out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swaptrain.errors import ConfigError
from swaptrain.verbs.plan import plan
from tests.support.matrix import proof_but
from tests.support.runs import (
    assert_same_state,
    config_of,
    losses,
    reference,
    trained,
    weights,
)
from tests.whole.test_chat import MODEL, chat

pytestmark = pytest.mark.trains


class ByHand(LlamaForCausalLM):
    """A Llama whose head computes the rows that have a label."""

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.model(input_ids=input_ids, **others).last_hidden_state
        following = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        rows = (following != -100).nonzero()[:, 0]
        logits = self.lm_head(hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows))
        return F.cross_entropy(logits.float(), following[rows])


def by_hand() -> ByHand:
    """The factory."""
    fields = {key: value for key, value in MODEL.items() if key != "model_type"}
    return ByHand(LlamaConfig(**fields, use_cache=False))


@pytest.mark.parametrize(
    ("dtype", "host"),
    proof_but([("float32", "256MiB"), ("bfloat16", "64MiB")], ("bfloat16", "64MiB")),
)
def test_the_bits_are_those_of_rows_left_out_by_hand(dtype: str, host: str, tmp_path: Path) -> None:
    """Losses and weights of packed conversations, over several segments."""
    sections = {
        "memory": {"host": host, "segment": "32KiB"},
        "dtype": dtype,
        "data": {"packing": True},
    }
    run_dir = trained(chat(tmp_path, "run", train={"skip_ignored": True}, **sections))
    config = chat(tmp_path, "plain", **sections)
    model = {"hf": None, "python": f"{__name__}:by_hand"}
    plain = reference(config.model_copy(update={"model": config.model.model_copy(update=model)}))
    assert losses(run_dir) == plain.losses
    assert_same_state(weights(run_dir), plain)


def test_a_model_without_such_a_head_is_refused(tmp_path: Path) -> None:
    """It would compute as ever, and the key would say nothing."""
    tree = {
        "model": {"python": "tests.support.models:convolutional"},
        "data": {"python": "tests.support.datasets:image_labels"},
        "train": {"steps": 2, "skip_ignored": True},
    }
    with pytest.raises(ConfigError, match=r"train\.skip_ignored: no linear layer"):
        plan(config_of(tmp_path / "run", tree))
