"""Text, tokens or any dataset become micro-batches, as a function of the step number.

Enter at `open_data` and `open_eval`, which give `Batches`. `sources` has the three kinds of data,
`batches` which item comes when. May import `store.disk`, `store.paths`, `errors` and `units`.
"""

from __future__ import annotations

from swaptrain.data.batches import Batches
from swaptrain.data.held_out import HeldOut, look_at_held_out
from swaptrain.data.open import open_data, open_eval, open_example

__all__ = ["Batches", "HeldOut", "look_at_held_out", "open_data", "open_eval", "open_example"]
