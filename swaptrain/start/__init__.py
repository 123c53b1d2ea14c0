"""A config to begin with, for a model directory, files and the machine that they are on.

`look_at_data`, `look_at_model` and `look_at_machine` find the facts, and `choices` makes a config
of them: pure, and with a comment for each choice. Enter at `verbs.init`, which asks `verbs.plan`
what it takes and writes it. May import `data`, `models`, `chat`, `config`, `memory` and what
is below.
"""

from __future__ import annotations

from swaptrain.start.choices import Choice, Method, chosen
from swaptrain.start.look_at_data import DataFacts, look_at_data
from swaptrain.start.look_at_machine import MachineFacts, look_at_machine
from swaptrain.start.look_at_model import ModelFacts, look_at_model
from swaptrain.start.new_file import check_new, write_new

__all__ = ["Choice", "DataFacts", "MachineFacts", "Method", "ModelFacts", "check_new", "chosen"]
__all__ += ["look_at_data", "look_at_machine", "look_at_model", "write_new"]
