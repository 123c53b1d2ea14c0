"""What a class of transformers does, asked of a small model of it and not of its name.

Enter at `leak.sight_of` (which tokens a prediction sees), and at `rows_apart.keeps_rows_apart` and
`rows_apart.reads_padding`. `tiny` makes the small model. May import torch, transformers and
`capture.forward`.
"""
