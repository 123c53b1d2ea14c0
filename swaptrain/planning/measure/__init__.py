"""What a run's instructions take on this machine: seconds, memory, what autograd saves.

`dry_run` runs one instruction of each kind, by a `Sampler`, and returns `Measured`;
`measured_record` keeps that for the next start. May import what `planning/` does.
"""
