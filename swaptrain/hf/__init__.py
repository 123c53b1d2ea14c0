"""Training with the arguments, and the output directory, of transformers' Trainer.

Enter at `train`. `arguments` maps or refuses each argument, `model` and `adapters` what is trained,
`order` gives the items in the Trainer's order, `output` writes what a Trainer leaves. May import
every room below `cli`.
"""

from __future__ import annotations

from swaptrain.hf.train import train

__all__ = ["train"]
