"""What a schedule means for the steps that a start is asked for.

Enter at `idle.py`: `check_rates` refuses steps that would all multiply by a learning rate of 0, and
`go_on_keys` says which keys a finished run goes on with. May import `config`, `store.live` and
`execute.schedule`.
"""
