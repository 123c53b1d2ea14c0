"""Finds damage in a run directory, and restores files from slots that hold the same bytes.

Enter at `verify.Verifier` and `repair.repair`; a `claims` unit is a slot and what its record claims
of its chunks, a finding is one claim that does not hold. May import every other room of `store`.
"""
