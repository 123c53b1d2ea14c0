"""What a run tells: metrics, progress, traces, and the memory that it uses.

Enter at `metrics`, `progress.Progress` and `trace`. May import `program`, `memory`, `store` and
`config`; decides nothing.
"""
