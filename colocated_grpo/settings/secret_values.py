"""Masks keys, tokens and passwords in settings that are shown or logged.

The name of a setting determines whether the setting is secret. Keys of common services are also found in other text,
as are logins, keys and webhook addresses in URLs.
"""

import json
import re
from collections.abc import Sequence

import yaml

MASK = "***"
_SECRET = re.compile(
    r"(api_?key|secret|password|passwd|passphrase|credentials?|authorization|cookie)$"
    r"|(^|[_.-])(key|token|auth|bearer|jwt|pat|webhook(_url)?)$",
    re.IGNORECASE,
)
_OF_TOKENIZERS = re.compile(r"(bos|eos|pad|unk|mask|cls|sep|stop|start|end|image|special)_token$", re.IGNORECASE)
_IN_TEXT = (
    re.compile(r"(://)[^/@\s]+(?=@)"),
    re.compile(r"(https?://\S*?hooks?\b[^/\s]*/)\S+"),
    re.compile(r"([?&]\w*(?:key|token|secret|sig|signature|password)=)[^&#\s]+", re.IGNORECASE),
    re.compile(r"\b(Bearer |Basic )\S+"),
    re.compile(  # AWS, OpenAI and Anthropic, Hugging Face, GitHub, GitLab, Slack, Google, JSON web tokens
        r"\b()(?:A[KS]IA[0-9A-Z]{16}|sk-[\w-]{20,}|hf_\w{20,}|gh[a-z]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
        r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
    ),
)
"""Secrets in text. The first group is shown."""


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
    if isinstance(value, str):
        for pattern in _IN_TEXT:
            value = pattern.sub(rf"\1{MASK}", value)
    return value


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
        except (yaml.YAMLError, ValueError, RecursionError):  # also a number of too many digits, or deep nesting
            return MASK
        hidden = masked(value, name.removeprefix("--"))
        return text if hidden == value else json.dumps(hidden)
    return str(masked(text, name.removeprefix("--")))
