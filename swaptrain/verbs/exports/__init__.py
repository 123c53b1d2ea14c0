"""What the verb `export` writes: the files of a model, or of an adapter.

Enter at `model_directory.write_model_directory` (as transformers loads it) and
`adapter.write_adapter` (as PEFT does); `new_directory` lets a directory be there as a whole or not
at all. May import what `verbs/` may; torch comes in with what merges an adapter.
"""
