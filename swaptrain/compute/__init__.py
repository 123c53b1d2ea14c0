"""An instruction on tensors: forwards, backwards and updates, on slabs, on any device.

Enter at `operations.Operations`, which carries out an instruction, at `runner.Runner`, which calls
the code of a segment, and at `update`, which steps the optimizer. Knows nothing of disks. May
import `store.format` for layouts, `models.quantization` for codes, `memory`, `capture` and
`program`.
"""
