"""transformers' own models with the number of labels of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from swaptrain.capture.losses.weighting import step_weights
from tests.capture.in_memory import StepResult, captured_model, cut_everywhere, segment_step
from tests.support.matrix import proof_but

pytestmark = pytest.mark.trains

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
COUNTS = (20, 1, 0, 7)


def llama() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, output_router_logits=True)
    return transformers.AutoModelForCausalLM.from_config(config)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
            decoder_start_token_id=0, dropout_rate=0.0,
        )
    )  # fmt: skip


def masked(counts: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Return micro-batches with so many trained labels, none at the first positions."""
    made = []
    for count in counts:
        ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(count))
        places = [i for i in range(24) if i % 12][:count]
        labels = torch.full((24,), -100)
        labels[places] = ids.view(-1)[places]
        made.append({"input_ids": ids, "labels": labels.view(2, 12)})
    return made


def part(model: nn.Module, batch: dict[str, Tensor], count: int) -> Tensor:
    """Return a micro-batch's part of the loss of a step with so many labels."""
    if isinstance(model, transformers.T5ForConditionalGeneration):  # which takes no number
        logits = model(**batch).logits.view(-1, 64)
        return F.cross_entropy(logits, batch["labels"].view(-1), reduction="sum") / count
    result = model(**batch, num_items_in_batch=count)
    if getattr(result, "aux_loss", None) is None:
        return result.loss
    # transformers adds the router's loss of each micro-batch as a whole.
    rest = 1 - 1 / len(COUNTS)
    return result.loss - model.config.router_aux_loss_coef * rest * result.aux_loss


@pytest.mark.parametrize(
    "factory", proof_but([llama, mixtral, t5], mixtral), ids=["llama", "mixtral", "t5"]
)
def test_the_step_is_that_of_num_items_in_batch(
    factory: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Bit for bit, cut everywhere; a router's loss keeps 1 / M."""
    batches = masked(COUNTS)
    uncut = captured_model(factory, batches[0], tmp_path)
    assert uncut.losses.counter is not None
    weights = step_weights([uncut.losses.counter(batch) for batch in batches])
    torch.manual_seed(0)
    model = factory().train()
    losses = []
    for batch in batches:
        loss = part(model, batch, sum(COUNTS))
        loss.backward()
        losses.append(float(loss.detach()))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = segment_step(cut_everywhere(uncut), factory, batches, weights)
    if factory is not mixtral:
        assert found.differences(StepResult(losses, gradients, {})) == []
        return
    assert found.losses == pytest.approx(losses, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-7)
