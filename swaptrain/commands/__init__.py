"""The arguments of each verb, and what hands them over to `verbs`.

Enter from `cli`, whose table has the functions of each word. `start` has the verbs with which one
begins, `look` those that read, `check` those that try things out, and `use` those that make
something of a run's weights; `arguments` has what several of them take. May import every room below
`cli`; what needs torch is imported inside of the function that calls it.
"""
