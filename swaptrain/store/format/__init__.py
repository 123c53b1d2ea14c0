"""The bytes and the JSON of a run directory: layouts of arrays, records and their schemas.

Enter at `layout` (tensors in an array), `record` (what a slot's `zarr.json` says) and `root` (what
is true of a whole run). May import `store.disk`, `program` and `errors`.
"""
