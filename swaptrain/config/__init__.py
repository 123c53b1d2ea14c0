"""One YAML file plus overrides, checked as a whole before use.

Enter at `load.load_config`; `schema` has the sections, each large one in a file of its own,
`resume_rules` which keys a run may change, and `reference` writes docs/config.md from both. May
import `errors`, `units`, `program` and `strict_json`, and nothing that is slow to import.
"""
