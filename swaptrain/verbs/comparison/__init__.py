"""A job in plain PyTorch and in swaptrain, compared bit for bit, as the verb `compare` does it.

Enter at `plain_run`, which takes a config to `swaptrain.reference`; tests take it from here too.
`scope` says what cannot be compared, `need` what plain PyTorch takes; `table` shows the `result`.
May import what `verbs/` may, and `verbs.inspection`.
"""
