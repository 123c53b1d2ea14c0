"""Whether packed rows stay apart is found by a trial, and the trial is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from swaptrain.models.trials.rows_apart import keeps_rows_apart, reads_padding
from tests.models.adapters.test_lora import GEMMA3
from tests.models.stored.test_pretrained import MIXTRAL
from tests.whole.test_exactness import GPT2, LLAMA

pytestmark = pytest.mark.trains

MAMBA: dict[str, Any] = {
    "model_type": "mamba", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2,
    "state_size": 4, "intermediate_size": 64,
}  # fmt: skip


def trial(fields: dict[str, Any]) -> bool:
    """Try an architecture."""
    config = transformers.AutoConfig.for_model(**fields)
    config.use_cache = False
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return keeps_rows_apart(mapping[type(config)], config)


@pytest.mark.parametrize("fields", [LLAMA, GPT2, GEMMA3, MIXTRAL], ids=lambda f: f["model_type"])
def test_attention_keeps_rows_apart(fields: dict[str, Any]) -> None:
    """Where positions say which row a token is of."""
    assert trial(fields)


def test_a_state_runs_through_all_rows() -> None:
    """A recurrent model reads what came before, whatever the positions are."""
    assert not trial(MAMBA)


def test_a_loss_of_all_tokens_reads_the_padding() -> None:
    """The routers' own loss counts every token; without it padding is no matter."""
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    for fields, reads in (
        ({**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 1.0}, True),
        (MIXTRAL, False),
        (MAMBA, False),
        (LLAMA, False),
    ):
        config = transformers.AutoConfig.for_model(**fields)
        config.use_cache = False
        assert reads_padding(mapping[type(config)], config) is reads


def test_a_model_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mean over the sequence is enough."""
    assert trial(LLAMA)
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def leaking(self: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = forward(self, x)
        return out + 1e-6 * x.mean(dim=1, keepdim=True)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", leaking)
    assert not trial(LLAMA)


def test_positions_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that know nothing of each other, and lie at the wrong positions."""
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    forward = rotary.forward

    def counting(self: nn.Module, x: Tensor, position_ids: Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.shape[1])[None] ** 2)

    monkeypatch.setattr(rotary, "forward", counting)
    assert not trial(LLAMA)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_packed_is_one_by_one(dtype: torch.dtype, bound: float) -> None:
    """Losses and gradients of packed rows are those of the rows alone, but for the order of sums.

    By the 2-norm of each gradient. With the unit roundoff u (2^-24, 2^-9) and some ten
    roundings one after the other the bounds are 32 u and 10 u; 3e-7 and 7e-3 were measured.
    """
    config = transformers.AutoConfig.for_model(**LLAMA)
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    rows = [torch.randint(0, 64, (1, n)) for n in (5, 9, 7)]
    model(
        input_ids=torch.cat(rows, 1),
        labels=torch.cat([torch.cat([torch.full((1, 1), -100), r[:, 1:]], 1) for r in rows], 1),
        position_ids=torch.cat([torch.arange(r.shape[1])[None] for r in rows], 1),
    ).loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    tokens = sum(r.shape[1] - 1 for r in rows)
    for row in rows:
        (model(input_ids=row, labels=row).loss * ((row.shape[1] - 1) / tokens)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        apart = (packed[name].double() - parameter.grad.double()).norm()
        assert apart <= bound * parameter.grad.double().norm(), name
