"""Tables of mistakes: for each error what raises it, by a name, and what the message says."""

import pytest


def cases(table):
    """The parameters of a test, which gets an error and what the table has for a name."""
    return [
        pytest.param(error, *case, id=name)
        for error, named in table.items()
        for name, case in named.items()
    ]
