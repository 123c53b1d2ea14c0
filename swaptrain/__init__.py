"""swaptrain trains PyTorch models that fit neither in GPU memory nor in RAM, from an SSD."""

__version__ = "0.1.0"
