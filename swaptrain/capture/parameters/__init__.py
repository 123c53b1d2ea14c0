"""Which parameters can be trained as plain PyTorch trains them; the others are refused by name.

Enter at `kinds`: before anything is written, it looks at each parameter of a constructed module and
at what the graph does with it. May import `program` and `errors`, nothing of the rest of `capture`
but `trace`.
"""
