"""Signatures of state that can run code when it is loaded, such as the pickle of a user's game in a checkpoint.

The key is private to the user. A valid signature proves that one of this user's runs wrote the state, so a run folder
made by another user cannot run code here.
"""

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

TRUST_VARIABLE = "COLOCATED_GRPO_TRUST_STATE"
"""Environment variable that permits state without a valid signature. No run folder can set this variable."""
_KEY_BYTES = 32


def key_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "colocated_grpo/signing_key"


def sign(data: bytes) -> str | None:
    """Return the signature of `data`.

    None if the key can be neither read nor created, for example in a read-only home folder.
    """
    try:
        return _signature(_key(), data)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def is_trusted(data: bytes, signature: str | None) -> bool:
    """Return True if a run of this user signed `data`, or if TRUST_VARIABLE is set to 1."""
    if os.environ.get(TRUST_VARIABLE) == "1":
        return True
    try:
        key = key_file().read_bytes()
    except (OSError, RuntimeError):
        return False
    return len(key) == _KEY_BYTES and hmac.compare_digest(_signature(key, data), str(signature))


def _signature(key: bytes, data: bytes) -> str:
    return hmac.digest(key, data, "sha256").hex()


def _key() -> bytes:
    """Return the user's key. The first call creates the key."""
    file = key_file()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another run has created the key in the meantime
                os.link(new, file)  # unlike a rename, a link never replaces a key
        finally:
            new.unlink()
    key = file.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{file} is not a key")
    return key
