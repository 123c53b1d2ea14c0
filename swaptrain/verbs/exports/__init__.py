"""What the verb `export` writes: the files of a model, or of an adapter."""
