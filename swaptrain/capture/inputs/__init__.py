"""What the dtypes of a micro-batch become before the model reads it.

Enter at `casts.py`: `batch_dtypes` gives the dtype of each tensor of the batch, from the model and
one micro-batch. `lineage.py` follows where the tensors of a batch go. Both the capture and
`swaptrain.reference` ask here. May import torch, `program`, `generators`, `errors`, and of
`capture` the rooms `forward` and `checks`.
"""
