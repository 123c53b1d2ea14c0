"""What a class of transformers does, asked of a small model of it and not of its name."""
