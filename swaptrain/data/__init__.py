"""Text, tokens or any dataset become micro-batches, as a function of the step number."""

from __future__ import annotations

from swaptrain.data.batches import Batches
from swaptrain.data.held_out import HeldOut, look_at_held_out
from swaptrain.data.open import open_data, open_eval, open_example

__all__ = ["Batches", "HeldOut", "look_at_held_out", "open_data", "open_eval", "open_example"]
