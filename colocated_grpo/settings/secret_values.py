"""Masks keys, tokens and passwords in settings that are shown or logged.

The name of a setting determines whether the setting is secret. Logins in URLs are masked too.
"""

import json
import re
from collections.abc import Sequence

import yaml

MASK = "***"
_SECRET = re.compile(
    r"(api_?key|secret|password|passwd|passphrase|credentials?|authorization)$|(^|[_.-])(key|token)$", re.IGNORECASE
)
_OF_TOKENIZERS = re.compile(r"(bos|eos|pad|unk|mask|cls|sep|stop|start|end|image|special)_token$", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Return True if a setting with this dotted name is a secret: args.api_key, hf_token, credentials.user."""
    return any(_SECRET.search(part) and not _OF_TOKENIZERS.search(part) for part in name.split("."))


def masked(value: object, name: str = "") -> object:
    """Return a setting with all secrets in it masked. name: name of the setting, or of the list that contains it."""
    if is_secret(name) and value and isinstance(value, str | dict | list):
        return MASK
    if isinstance(value, dict):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    return _LOGIN_IN_URL.sub(MASK, value) if isinstance(value, str) else value


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with secrets masked.

    Understands `--name value`, `--name=value`, and values that are YAML mappings or lists.
    """
    result, name = [], ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            result.append(f"{name}={_masked_text(value, name)}" if equals else name)
            name = "" if equals else name
        else:
            result.append(_masked_text(argument, name))
            name = ""
    return result


def _masked_text(text: str, name: str) -> str:
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            return MASK
        hidden = masked(value, name.removeprefix("--"))
        return text if hidden == value else json.dumps(hidden)
    return str(masked(text, name.removeprefix("--")))
