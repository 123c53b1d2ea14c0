"""What a forward asks of its batch: assertions, and values that Python code reads.

Enter at `record.recorded_checks` (during the export), `batch_values.BatchValues` (answers questions
about the batch), `split.take_checks` (a graph without them, and the checks apart) and
`batch_checks.BatchChecks` (made on each micro-batch).
May import what `swaptrain.capture` may.
"""
