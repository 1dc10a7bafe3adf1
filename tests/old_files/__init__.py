"""Files that commit 3b85c57 has written (tests/data/written_by_3b85c57), and its public names: both still work.

`recipe.py` says what was made and how it was trained, for those who write and those who read. `write.py` was run with
that commit; `reading.py` reads with today's code.
"""
