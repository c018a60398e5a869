"""Which token to show a cluster. Always decided here: Ray's own default depends on files that an earlier Ray left behind.

The variables are Ray's: RAY_AUTH_MODE (token or disabled), RAY_AUTH_TOKEN, and RAY_AUTH_TOKEN_PATH, a file that holds the token.
"""

from __future__ import annotations

import os
from pathlib import Path

from draftmill.storage.errors import UserError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

OWN_FILE = Path("~/.ray/auth_token")
"""Where Ray keeps a token of its own; read only under RAY_AUTH_MODE=token."""


def token_headers() -> dict[str, str]:
    """The headers for requests to a cluster, and Ray's own mode set to match; UserError if there should be a token and is none.

    Without RAY_AUTH_MODE, a token is shown if one of the other two variables is set.
    """
    mode = os.environ.get(MODE) or ("token" if os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH) else "disabled")
    if mode not in {"token", "disabled"}:
        raise UserError(f"{mode!r} is not allowed; allowed: token, disabled", field=MODE)
    os.environ[MODE] = mode
    return {"Authorization": f"Bearer {_token()}"} if mode == "token" else {}


def _token() -> str:
    if token := os.environ.get(TOKEN, "").strip():
        return token
    name = os.environ.get(TOKEN_PATH)
    path = Path(name or OWN_FILE).expanduser()
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        if name is None:
            raise UserError(f"{MODE} is token, but there is none; set {TOKEN} or {TOKEN_PATH}", field=MODE) from None
        raise UserError(f"{path}: {reason}", field=TOKEN_PATH) from None
    if not token or not token.isprintable() or not token.isascii():
        raise UserError(f"{path} holds no token", field=TOKEN_PATH)
    return token
