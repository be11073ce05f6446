"""The secret by which the processes of a job on several machines recognise each other.

It is the text of an environment variable, the same in all processes, none by default. It is never
sent: each side sends random text, and gets it back hashed together with the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from typing import Any

#: The environment variable.
VARIABLE = "MTF_GRADSYNC_SECRET"


def is_set() -> bool:
    """Returns whether this process has a secret."""
    return bool(os.environ.get(VARIABLE))


def challenge() -> str:
    """Returns random text for the other side to make a proof of."""
    return secrets.token_hex(16)


def proof(role: str, *challenges: str) -> str:
    """Returns hexadecimal digits that show that this process has the secret.

    They depend on both sides' challenges, and on `role`, so that no side can send a proof back.
    """
    key = os.environ.get(VARIABLE, "").encode()
    return hmac.new(key, json.dumps([role, *challenges]).encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, role: str, *challenges: str) -> bool:
    """Returns whether a proof was made with this process's secret; see `proof`."""
    expected = proof(role, *challenges).encode()
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), expected)
