"""Text, tokens or any dataset become micro-batches, as a function of the step number.

Enter at `open_data` and `open_eval`, which give `Batches`, or at `find_data` and `find_eval`, which
write nothing before `Opening.open`. `sources` has text, tokens and Python datasets,
`conversations` rows, `batches` which item comes when. May import `chat`, `store.disk`,
`store.paths`, `strict_json`, `processes`, `generators`, `errors` and `units`.
"""

from __future__ import annotations

from swaptrain.data.batches import Batches, token_count
from swaptrain.data.held_out import HeldOut, look_at_held_out
from swaptrain.data.open import (
    Opening,
    describe_rows,
    find_data,
    find_eval,
    open_data,
    open_eval,
    open_example,
)

__all__ = ["Batches", "HeldOut", "Opening", "describe_rows", "find_data", "find_eval"]
__all__ += ["look_at_held_out", "open_data", "open_eval", "open_example", "token_count"]
