"""What the operating system is asked of a disk: its file system, and that writes are durable.

Enter at `flush`. May import nothing of the house; `store.files` puts its errors in words.
"""
