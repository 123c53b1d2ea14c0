"""From what the config says of a model to a class, and what of the model is trained.

Enter at `classes.choose_class`, which `execute/hugging_face.py` asks for the class of transformers
that does the job, and at `trained.trained_parameters`. This room may import capture, store and
data, and never execute.
"""
