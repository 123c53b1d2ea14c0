"""Who may write to a run directory, and where its paths may lead.

Enter at `lock.RunLock` and `containment.check_contained`. May import
`store.paths`, `store.disk` and `errors`.
"""
