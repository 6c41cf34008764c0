"""Tables of mistakes: for each error what raises it, and what the message says."""

import pytest


def cases(table):
    """The parameters of a test, which gets an error and what the table has for a name."""
    return [
        pytest.param(error, *case, id=name)
        for error, named in table.items()
        for name, case in named.items()
    ]


def raising(table):
    """Parametrizes a test by a table of calls, of which each has a part of its message as a name.

    The test gets the call, its error, and the message.
    """
    each = {
        error: {match: (call, f"(?s){match}") for match, call in calls.items()}
        for error, calls in table.items()
    }
    return pytest.mark.parametrize(("error", "call", "match"), cases(each))


def check_raises(call, error, match):
    with pytest.raises(error, match=match) as raised:
        call()
    return raised.value
