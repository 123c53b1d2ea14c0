"""Weights that lie in a directory of safetensors, by the model's names.

Enter at `pretrained.Pretrained`; `checkpoint.Checkpoint` reads the files. May import what
`models/` does.
"""
