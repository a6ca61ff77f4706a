"""What an error of jflash must say."""

import re

import pytest


def refuses(name, run, error, words):
    """The text of the error of `run()`: of exactly this kind, the call first, then all `words` in order."""
    pattern = ".*".join(map(re.escape, words.split(" ... ")))
    with pytest.raises(error, match=f"(?s){pattern}") as caught:
        run()
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.startswith(f"`{name}("), text
    assert "Got " in text and text.endswith("."), text
    assert " at 0x" not in text, text  # no Python reprs of objects
    return text
