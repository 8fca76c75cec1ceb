"""Check training samples in files, of any trainer, without a server.

`reader` reads JSON Lines, JSON and Parquet, and `shapes` finds the token lists in what it read. `row_lists`, `row_checks` and
`alignment` check a row by itself, `token_rules` with a tokenizer, `earlier_rows` and `groups` check it against other rows. `verify`
runs all of them over files of any size: one line, a bounded window of earlier rows and a bounded number of findings are in memory.
"""
