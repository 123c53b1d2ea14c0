"""The checks of a machine that the verb `doctor` makes, one file for each thing that it looks at.

Enter at the functions `check_disk`, `check_memory_limits`, `check_packages`, `check_processor`,
`check_device`, `check_environment` and `check_clock`. Each gives `CheckResult`s: a verdict, what
was found, what to do. None of them changes anything but temporary files, which are deleted. May
import what `verbs/` may.
"""
