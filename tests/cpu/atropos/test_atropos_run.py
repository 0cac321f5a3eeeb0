"""A whole run: an unmodified Atropos environment, an API server, two ranks with real vLLM."""

from __future__ import annotations

import json
import math
import shlex
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any
from urllib.request import Request, urlopen

import openai

from colocated_grpo.tracking import files
from tests.support.atropos_commands import EXAMPLES
from tests.support.atropos_environment import GROUP, environment
from tests.support.servers import EMBEDDED, UPSTREAM, ApiProcess, free_port, needs_atropos
from tests.support.training_runs import AtroposCommandRun, ForkedRun, LaunchedRun, Settings, settings, tiny_model

pytestmark = needs_atropos

SORTING = {"type": "task", "name": "sorting", "args": {"min_digits": 2, "max_digits": 3}}


def atropos_settings(api: str, port: int, *others: Settings, entry: Settings | None = None, **changes: Any) -> Settings:
    entry = {"type": "atropos", "url": api, "server": {"port": port}, **(entry or {})}
    return settings(
        tiny_model(),
        environments=[entry, *others],
        rollout={"prompts_per_step": 4, "group_size": GROUP, "max_prompt_tokens": 24, "max_completion_tokens": 16},
        checkpoint={"every": 2},
        **{"evaluation": {"every": 0}, **changes},
    )


def test_an_environment_and_a_task_are_trained_together_on_two_nodes(tmp_path):
    port = free_port()
    place = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(UPSTREAM))
        evaluation = {"every": 3, "prompts": 4}
        config = atropos_settings(
            api.url,
            port,
            SORTING,
            training_steps=6,
            evaluation=evaluation,
            tracking={"rollouts_per_step": 4 * GROUP},
        )
        nodes = [
            stack.enter_context(LaunchedRun(tmp_path, config, *place, "--node-rank", str(node), name=f"node{node}"))
            for node in range(2)
        ]
        run = nodes[0]
        run.wait_until(lambda: is_open(port))
        with ThreadPoolExecutor() as clients:
            # Before the environment, whose first batch the run waits for: it cannot end meanwhile.
            responses = clients.map(lambda call: call(port), (generate, stream, top_logprobs))
        response, texts, entries = responses
        stack.enter_context(environment(tmp_path, api.url, port))
        for node in nodes:
            node.finish()
            assert node.processes() == []
    assert "2 x CPU" in run.stdout
    assert "held out" not in nodes[1].stdout, "the first node alone reports"
    assert (run.folder / "final_model/model.safetensors").exists()
    assert_has_vllms_format(response)
    # Tokens that a client has not read yet arrive together. Only the last one, a special token, may add no text.
    assert "".join(texts) and all(texts[:-1])
    assert_are_probabilities(entries)
    assert [node.stderr for node in nodes] == ["", ""]
    rows = run.rows(files.TRAIN)
    assert len(rows) == 6
    assert all(row["atropos/dropped"] == 0 for row in rows)
    rollouts = [row for row in files.read_rows(run.folder / files.ROLLOUTS_FILE) if row["kind"] == files.TRAIN]
    for step in range(6):
        sources = Counter(row["source"] for row in rollouts if row["step"] == step)
        assert sources == {"atropos": 2 * GROUP, "sorting": 2 * GROUP}
    assert [row["step"] for row in run.rows(files.EVALUATION)] == [0, 3, 6]
    assert all(row["atropos/unknown_origin"] == 0 for row in rows)
    assert rows[0]["staleness"] == 0
    # The environment samples at 0.8 and does not send it. With another temperature the two differ by far more.
    assert rows[0]["mismatch/abs"] < 1e-4
    assert "registered again" not in run.stdout


def test_a_run_survives_a_killed_api_server_a_restarted_environment_and_missing_logprobs(tmp_path):
    port = free_port()
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(EMBEDDED))
        entry = {"missing_logprobs": "recompute", "keep_last_batch": True}
        config = atropos_settings(api.url, port, entry=entry, training_steps=10_000)
        run = stack.enter_context(ForkedRun(tmp_path, config))
        half_silent = {"--env.wandb_name": "half-silent"}
        with environment(tmp_path, api.url, port, **half_silent):
            run.wait_for_step(1)
            api.kill()
        api.start()
        stack.enter_context(environment(tmp_path, api.url, port, **half_silent))
        run.wait_until(lambda: "registered again" in run.stdout)
        run.wait_for_step(len(run.rows(files.TRAIN)) + 1)
        run.terminate()
        run.finish()
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row["atropos/dropped"] == 0 for row in rows)
    batch = json.loads((run.folder / files.ATROPOS_BATCH_FILE).read_text())
    assert sum(len(group["tokens"]) for group in batch) == 4 * GROUP


def test_a_run_stopped_while_waiting_for_a_batch_trains_every_received_batch_after_a_resume(tmp_path):
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(EMBEDDED))
        config = atropos_settings(api.url, free_port(), training_steps=2)
        # The groups are as long as a sequence may be.
        config["rollout"] |= {"max_prompt_tokens": 2, "max_completion_tokens": 2}
        post_batch(api)
        run = stack.enter_context(ForkedRun(tmp_path, config, ranks=2))
        run.wait_for_step(0)
        run.terminate()
        assert run.wait() == 0
        assert files.read_summary(run.folder) == {"state": "stopped", "steps": 1}
        post_batch(api)
        resumed = stack.enter_context(ForkedRun(tmp_path, config, "--resume", "auto", ranks=2))
        resumed.finish()
    assert [row["step"] for row in resumed.rows(files.TRAIN)] == [0, 1]


def test_bad_groups_end_a_run_only_if_no_others_come_and_after_a_checkpoint(tmp_path):
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(EMBEDDED))
        config = atropos_settings(api.url, free_port(), training_steps=5, entry={"unusable_timeout": 1e-9})
        bad = {"inference_logprobs": None, "env_id": 7}
        post_batch(api, changes=[{}, {}, {}, bad])
        run = stack.enter_context(ForkedRun(tmp_path, config))
        run.wait_for_step(0)
        for _ in range(2):
            post_batch(api, changes=[bad] * 4)
        assert run.wait() == 1
    assert "error: GRPO requires inference_logprobs for importance sampling! " in run.stderr
    assert "sequences of environment 7" in run.stderr
    (row,) = run.rows(files.TRAIN)
    assert row["atropos/dropped/missing_logprobs"] == GROUP
    assert [folder.name for folder in (run.folder / "checkpoints").iterdir()] == ["step_000001"]


def test_a_command_of_atropos_guides_trains_on_an_environment_without_a_config_file(tmp_path):
    """The quick test of the second guide, verbatim. Its server is replaced by the run's own engine."""
    [example] = [example for example in EXAMPLES if example.id == "second guide, quick test"]
    port = free_port()
    ours = {
        "model.name": tiny_model(),
        "engine.placement": "colocated",
        "engine.kv_cache_memory_bytes": 64 << 20,
        "engine.enforce_eager": "true",
        "policy.compile": "false",
        "environments.0.connect_timeout": 300,
    }
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(UPSTREAM))
        arguments = [
            *shlex.split(example.text.replace("\\\n", " ")),
            *("--atropos-url", api.url, "--vllm-port", str(port), "--seq-len", "40", "--checkpoint-interval", "2"),
            *(word for key, value in ours.items() for word in (f"--{key}", str(value))),
        ]
        run = stack.enter_context(AtroposCommandRun(tmp_path, arguments))
        stack.enter_context(environment(tmp_path, api.url, port))
        run.finish()
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(5))
    # Weights reach the engine every third step (--vllm-restart-interval), so rollouts are at most that old.
    assert max(row["staleness"] for row in rows) > 0
    assert {path.name for path in run.folder.glob("*_*") if path.is_dir()} == {"step_2", "step_4", "final_model"}


def post_batch(api: ApiProcess, changes: Sequence[Settings] = ({},) * 4) -> None:
    """Post four groups that were sampled elsewhere."""
    group = {
        "tokens": [[1, 2, 3, 4]] * GROUP,
        "masks": [[-100, -100, 3, 4]] * GROUP,
        "scores": [float(row) for row in range(GROUP)],
        "inference_logprobs": [[1.0, 1.0, -1.0, -1.0]] * GROUP,
    }
    body = json.dumps([group | change for change in changes]).encode()
    with urlopen(Request(f"{api.url}/scored_data_list", body, {"Content-Type": "application/json"}), timeout=60):
        pass


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60):
        return True
    return False


def stream(port: int) -> list[str]:
    """Return the texts of a stream."""
    body = {"model": "tiny", "prompt": "sort 31", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    return [chunk.choices[0].text for chunk in _client(port).completions.create(**body, stream=True)]


def top_logprobs(port: int) -> list[dict[str, float]]:
    """Return the top log-probabilities of each sampled token."""
    body = {"model": "tiny", "prompt": "sort 31", "max_tokens": 8, "temperature": 0.25, "logprobs": 20}
    return _client(port).completions.create(**body).choices[0].logprobs.top_logprobs


def _client(port: int) -> openai.OpenAI:
    return openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=300)


def assert_are_probabilities(entries: list[dict[str, float]]) -> None:
    """Check that each entry adds up to about 1, as it does only with the weights and temperature of the sampling."""
    assert all(20 <= len(entry) <= 21 for entry in entries)
    assert all(0.7 < sum(map(math.exp, entry.values())) < 1.01 for entry in entries)


def generate(port: int) -> dict[str, Any]:
    """Send a request for two completions."""
    body = {"prompt": "sort 31", "n": 2, "max_tokens": 6, "stop": ["0"], "prompt_logprobs": 2, "top_k": 5}
    request = Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=300) as response:
        return json.load(response)


def assert_has_vllms_format(response: dict[str, Any]) -> None:
    nothing, *entries = response["prompt_logprobs"]
    assert nothing is None
    assert [int(next(iter(entry))) for entry in entries] == response["prompt_token_ids"][1:]
    assert all(2 <= len(entry) <= 3 and max(entry.values()) <= 0 for entry in entries)
    assert not any("0" in text for text in response["text"])
    for tokens, logprobs in zip(response["token_ids"], response["logprobs"], strict=True):
        assert [int(token) for [entry] in logprobs for token in entry] == tokens
