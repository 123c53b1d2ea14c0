"""What a run may take of memory, device and disk, and what is said where that is too little.

May import what `planning/` does.
"""
