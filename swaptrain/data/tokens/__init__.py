"""Token ids on the disk: arrays written once, files of others, and what is cut from them.

Enter at `token_cache.built_once` (text and rows become one array), `token_files.open_token_file`
(files as users have them, whose numbers `bin_files` makes out) and `packed.PackedTokens` (sequences
of one length). `special_tokens` keeps text from being read as special tokens. May import
`store.disk`, `store.paths`, `strict_json` and `errors`, and nothing of the rest of `data`.
"""
