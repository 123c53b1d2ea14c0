"""The checks of a machine that the verb `doctor` makes, one file for each thing that it looks at.

Each gives `CheckResult`s: a verdict, what was found, what to do. None of them changes anything but
temporary files, which are deleted.
"""
