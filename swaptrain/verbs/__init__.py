"""The words of the command line: one file for each, and the tables that it prints.

Enter at `train.train`, `plan.plan`, `inspect.inspect`, `verify.verify_run` and `export`. May import
every room of the house; nothing but `swaptrain.commands` and `swaptrain.cli` import this one.
"""
