"""Token ids on the disk: arrays that are written once, and files of others, read in place."""
