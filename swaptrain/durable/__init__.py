"""Which objects of a step are on the disk, and from when a crash no longer loses them.

Enter at `disk_backing` (reads and writes objects for the RAM tier), `commits` (switches a segment's
slot), `tree_commits` (switches the whole store) and `handoff` (activations and gradients that a
resumed step needs). May import `compute`, `store`, `memory` and `program`.
"""
