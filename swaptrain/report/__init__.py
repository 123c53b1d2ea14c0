"""One page of a run: what its files say, as charts and tables in a single HTML file.

Enter at `read.read_run_files` and `page.page_of`. The files are read in `rows`, `timeline` and
`instruction_memory`; `chart` says what a chart is, `sections` which ones there are, and `drawing`
has matplotlib draw them. May import `store`, `config`, `observe` and `planning`; writes nothing.
"""
