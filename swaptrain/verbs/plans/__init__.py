"""What a config will take, in the forms in which the verb `plan` says it.

Enter at `planned.planned`, which prepares, cuts and prices a config. `table` shows its figures,
`layers` the modules, `suggest` other settings, `what_if` other machines, `ranks` several of them;
`questions` has what was asked for. May import what `verbs/` may.
"""
