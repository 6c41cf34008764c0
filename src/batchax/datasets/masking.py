"""Messages without what lets others in: passwords of addresses, keys, tokens, signatures."""

from __future__ import annotations

import os
import re

_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SIGNATURE|SAS|CONNECTION_STRING", re.I)
_SIGNED = re.compile(
    r"((?:sig|signature|token|x-amz-[a-z-]+|key|secret)\s*[=:]\s*)[^&\s\"']+", re.I
)
_USER = re.compile(r"(:/+)[^\s/?#\"']*@")  # of one slash, too, as pathlib.Path leaves it


def masked(text: str, *addresses: str) -> str:
    """A text with dots in place of each secret.

    These are signatures, user info of addresses in the text, in the environment and of `addresses`
    (of which the text may hold a part, as they may be malformed), and values of variables that
    are named like secrets.
    """
    for name, value in [*os.environ.items(), *(("", address) for address in addresses)]:
        if _SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "...")
        user, at, _ = value.partition("://")[2].rpartition("@")
        if at:
            text = text.replace(f"{user}@", "...@")
            password = user.partition(":")[2]
            text = text.replace(password, "...") if len(password) > 3 else text
    return _SIGNED.sub(r"\1...", _USER.sub(r"\1...@", text))
