"""The machine that a run is on: its speeds, measured once, and its fingerprint.

Enter at `speeds`, which keeps the figures of `probe`, and at `fingerprint`, which says on what the
last bits of a result depend. May import `store`, `config` and `observe`.
"""
