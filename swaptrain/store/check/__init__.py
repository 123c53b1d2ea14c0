"""Finds damage in a run directory, and restores files from slots that hold the same bytes.

Enter at `verify.Verifier` and `repair.repair`; a `Claim` has the checksums that a record
gives for its chunks, a finding is one that does not hold. May import every other room of `store`.
"""
