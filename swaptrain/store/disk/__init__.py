"""System calls on files: direct reads and writes, and writes that are durable when they return.

Enter at `direct.DirectIO`, `durable_files` and `flush`. Every error of the operating system leaves
here with its file and its cure. May import `errors`, `units` and `spans`.
"""
