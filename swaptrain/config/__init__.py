"""One YAML file plus overrides, checked as a whole before use.

Enter at `load.load_config`; `schema` has the keys and their meaning, `resume_rules` which of them a
run may change, and `reference` writes docs/config.md from both. May import `errors`, `units` and
`strict_json`, and nothing that is slow to import.
"""
