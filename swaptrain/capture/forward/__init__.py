"""What a model's forward takes beside the micro-batch, and what it gives back.

Enter at `loss.loss_of`, which both the capture and `swaptrain.reference` use, and at
`constants.bind_constants`. This room imports torch and `swaptrain.errors`, and nothing of the house
beside it.
"""
