"""Initial weights of a module that fits no memory: its constructor is recorded and replayed.

Enter at `construct.construct`, which runs the constructor on fake parameters under `record`; then
`replay` gives one parameter at a time, with the bits of the plain constructor. Where a constructor
cannot be recorded, `filebacked` builds the module on files. May import torch, `errors` and what
`capture/` has that looks at parameters.
"""
