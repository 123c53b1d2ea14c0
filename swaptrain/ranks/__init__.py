"""Several processes that train one model together, under torchrun.

Enter at `launch.launched`, which says whether there are several, and `group.Group`, which connects
them, as `meeting` lets them find each other. `agreement` compares what each was started with, and
`same_data` its data. `recovery` and `commit` make a step of all count at one moment, `exchange`
brings weights and sums to where they are computed with. `limits` says what several ranks cannot do,
`own_disk` where the directory of one lies, `layout` what all of them have together. All of it runs
on the main thread, in the order of the program; `last_words` alone asks on another one. May import
`durable`, `data`, `memory`, `store`, `config` and `program`; not `planning` or `run`, which import
it.
"""
