"""The words of the command line: one file for each, and the tables that it prints.

Enter at `train.train`, `plan.plan`, `inspect.inspect_run`, `verify.verify_run` and
`export.export_weights`. May import every room below; `commands`, `cli`, `api` and `hf` lie above
and import this one.
"""
