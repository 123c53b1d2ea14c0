"""The run directory on the disk. Its rooms, from the bottom up:

`disk` (system calls, flushed), `format` (bytes and JSON of files), `slots` (what is live, and the
switch), `access` (who may write, and where to), `read` (readers beside a writer) and `check` (what
is damaged). May import `program`, `config` and `errors`; never `memory` or torch's kernels.
"""
