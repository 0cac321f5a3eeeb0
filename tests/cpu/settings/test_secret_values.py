"""Settings that are secrets by their names are masked, and no others."""

from __future__ import annotations

import pytest

from colocated_grpo.settings.errors import is_secret, masked, masked_arguments

SECRETS = (
    "environments.0.args.api_key args.openai_api_key hf_token password aws.secret_access_key apiKey key CREDENTIALS"
)
SECRETS += " headers.Authorization X-Auth-Token client_secret db_passwd credentials.user"
SECRETS += " args.bearer github_pat args.auth http-auth slack_webhook webhook_url session_cookie id.jwt"
OTHERS = "max_tokens batch.max_tokens_per_micro_batch server.api_key_variable eos_token args.stop_token tokenizer keys"
OTHERS += " key_column hotkey monkey author pattern path compat webhook_retries"


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("key=AKIAIOSFODNN7EXAMPLE;region=x", "key=***;region=x"),
        ("Bearer abc.def", "Bearer ***"),
        ("https://hooks.slack.com/services/T0/B0/x1", "https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/12/x1", "https://discord.com/api/webhooks/***"),
        ("https://a.webhook.office.com/webhookb2/x1?y=1", "https://a.webhook.office.com/***"),
        ("http://judge:80/v1?n=1&api_key=x1&b=2#c", "http://judge:80/v1?n=1&api_key=***&b=2#c"),
        ("sk-proj-" + "a1" * 12, "***"),
        ("hf_" + "a1" * 12, "***"),
        ("ghp_" + "a1" * 18, "***"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://example.com/hooks-guide?page=2", "https://example.com/hooks-guide?page=2"),
    ],
)
def test_keys_in_text_are_masked_whatever_their_setting_is_called(text, shown):
    assert masked({"args": {"note": [text]}}) == {"args": {"note": [shown]}}


def test_yaml_in_an_argument_is_masked_inside():
    assert masked_arguments(["--args", '{"api_key": "x", "n": 3}', "--list", "[1, 2]"]) == [
        "--args",
        '{"api_key": "***", "n": 3}',
        "--list",
        "[1, 2]",
    ]
    for unreadable in ("{api_key: x", "[" * 5000, "{api_key: x, n: " + "9" * 5000 + "}"):
        assert masked_arguments([f"--args={unreadable}"]) == ["--args=***"]
