"""The RAM tier: slabs of the pool, the objects in them, and limits of the whole process.

Enter at `tier.Tier`, which keeps, evicts and reads ahead as the plan of a step says. `backing` is
the protocol of the storage below it, `slab` the pool, and `malloc` the rules of torch's own heap.
May import `program` and torch; knows nothing of files.
"""
