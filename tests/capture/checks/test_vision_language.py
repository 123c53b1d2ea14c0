"""Vision-language models of transformers train with plain PyTorch's bits, uncut and cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capture.in_memory import captured_model, cut_into, eager_step, segment_step
from tests.support.matrix import proof_but
from tests.support.vision_language import MODELS

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("name", proof_but(MODELS, "llava", whole=[*MODELS][-2:]))
def test_it_trains_with_plain_bits(name: str, tmp_path: Path) -> None:
    """Losses and gradients of two micro-batches, in segments of about 20 KB of weights."""
    model = MODELS[name]
    batches = model.batches()
    uncut = captured_model(model.make, batches[0], tmp_path)
    captured = cut_into(uncut, 20_000)
    for number, batch in enumerate(batches):
        captured.checks.verify(batch, lambda number=number: f"micro-batch {number}")  # type: ignore[misc]
    assert len(captured.model.segments) > 2
    result = segment_step(captured, model.make, batches)
    assert not result.differences(eager_step(model.make, batches))
