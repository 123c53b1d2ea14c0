"""What a run may take of memory, device and disk, and what is said where that is too little.

Enter at `device_budget`, `disk_budget` and `creation`; `remedies` says what to change. May import
what `planning/` does.
"""
