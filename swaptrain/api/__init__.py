"""swaptrain from Python: `swaptrain.train`, `swaptrain.plan`, `swaptrain.open`.

The face is `train.py`. `settings.py` makes a config of arguments, `objects.py` gives a config what
a script has as objects, `run.py` is what comes back. This room is above the verbs, which it calls
as the command line does; nothing below knows of it.
"""
