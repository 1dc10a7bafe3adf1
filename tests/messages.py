"""What a message must contain, for the `match` of `pytest.raises` and `pytest.warns`."""

from __future__ import annotations

import re


def saying(*parts: str) -> str:
    """A pattern that a message matches if it has all parts, in any order: the name, the value, the remedy.

    Not the sentence around them: whoever moves a comma should not have to change a test.

    >>> bool(re.search(saying("`rows`", "3"), "3 is no number of `rows`."))
    True
    >>> bool(re.search(saying("`rows`", "3"), "`rows` must be positive."))
    False
    """
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
