"""Adapters on a base that stays as it is: made, gone on with, merged, and refused where unseen.

Enter at `lora.inject` and `merge.merged_rows`. May import what `models/` does.
"""
