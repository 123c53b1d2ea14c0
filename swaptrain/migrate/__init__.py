"""What a config of another tool means here: Axolotl, LLaMA-Factory, TRL and the Trainer's own keys.

Enter at `migration.migrate`, which returns the YAML of a config. A tool has a file with its own
keys and defaults; what they share has one by its meaning. A key that nothing reads ends up in a
comment, with the answer of `config.other_tools`. May import `config`, `chat.files`, `errors`,
`units` and `strict_json`.
"""

from __future__ import annotations

from swaptrain.migrate.migration import migrate
from swaptrain.migrate.recognise import TOOLS

__all__ = ["TOOLS", "migrate"]
