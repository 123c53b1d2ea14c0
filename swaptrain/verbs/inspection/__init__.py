"""What a run directory holds, as the verb `inspect` reads it.

Enter at `report.read_run` (a run), `tensor.inspect_tensors` (some of its tensors) and
`difference.inspect_difference` (two runs). Records of what was found are in files of their own, and
files called `..._table` show them. May import what `verbs/` may; torch inside of a function
only.
"""
