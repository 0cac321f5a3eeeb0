"""Settings that are secrets by their names are masked, and no others."""

from __future__ import annotations

import pytest

from colocated_grpo.settings.secret_values import is_secret, masked, masked_arguments

SECRETS = (
    "environments.0.args.api_key args.openai_api_key hf_token password aws.secret_access_key apiKey key CREDENTIALS"
)
SECRETS += " headers.Authorization X-Auth-Token client_secret db_passwd credentials.user"
OTHERS = "max_tokens batch.max_tokens_per_micro_batch server.api_key_variable eos_token args.stop_token tokenizer keys"
OTHERS += " key_column hotkey monkey"


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets_are_recognised(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", OTHERS.split())
def test_other_names_are_not(name):
    assert not is_secret(name)


def test_values_are_masked_at_any_depth_and_logins_in_addresses_too():
    settings = {"a": [{"api_key": "x", "n": 3, "key": 7}], "url": "http://me:pw@host:1/v1", "token": "", "keep": None}
    assert masked(settings | {"credentials": {"user": "me"}}) == {
        "a": [{"api_key": "***", "n": 3, "key": 7}],
        "credentials": "***",
        "url": "http://***@host:1/v1",
        "token": "",
        "keep": None,
    }


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("run.py --config a.yaml --hf_token x --seed 5", "run.py --config a.yaml --hf_token *** --seed 5"),
        ("--args.api_key=x y", "--args.api_key=*** y"),
        ("--url=http://me:pw@host/a", "--url=http://***@host/a"),
        ("--rollout.max_prompt_tokens 512", "--rollout.max_prompt_tokens 512"),
        ("--hf_token --seed 5", "--hf_token --seed 5"),
    ],
)
def test_a_command_is_shown_without_its_secrets(given, shown):
    assert masked_arguments(given.split()) == shown.split()


def test_yaml_in_an_argument_is_masked_inside():
    assert masked_arguments(["--args", '{"api_key": "x", "n": 3}', "--list", "[1, 2]"]) == [
        "--args",
        '{"api_key": "***", "n": 3}',
        "--list",
        "[1, 2]",
    ]
    assert masked_arguments(["--args={api_key: x"]) == ["--args=***"]
