"""Adapters on a base that stays as it is: made, gone on with, and merged into it.

Enter at `lora.inject`, `files.AdapterFiles` and `merge.merged_weight`; `refused` finds adapters in
a directory of weights, where they would be passed over. May import what `models/` does.
"""
