"""A server that cannot serve a run is refused in one line before the trainer reads weights."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colocated_grpo.assembly.serving import connect_servers
from colocated_grpo.rollout.vllm.adapters import VLLMAdapters
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.servers import __main__ as servers
from colocated_grpo.servers.options import REQUESTED, STATE_VARIABLE, parse, resumed, save_ready, save_requested
from colocated_grpo.settings.config_json import config_json_in, shape_of
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from tests.support.small_policy import config_of
from tests.support.training_runs import tiny_model

MODEL = tiny_model()
SHAPE = shape_of(config_json_in(MODEL))
INFO = {
    "instance": "1",
    "model": str(MODEL),
    "shape": SHAPE,
    "dtype": "float32",
    "max_model_len": 4096,
    "has_received_weights": False,
}


@contextmanager
def serving(**changes: Any) -> Generator[str]:
    """Answer as an engine server with these facts. Yields its address."""
    answers = {
        "/bridge/info": {**INFO, **changes},
        "/lora/status": {"enabled": False, "adapter_name": None},
        "/engine/stream": {},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            raw = json.dumps(answers[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Print no request lines."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def settings_of(url: str, compute_dtype: str = "auto", **engine: Any) -> Config:
    policy: dict[str, Any] = {"compute_dtype": compute_dtype}
    if engine.get("bridge") == "adapter":
        policy["lora"] = {}
    return config_of(MODEL, policy=policy, engine={"placement": "server", "urls": [url], **engine})


@pytest.mark.parametrize(
    ("facts", "settings", "line"),
    [
        ({"shape": {**SHAPE, "hidden_size": 7}}, {}, "whose hidden_size is 7, but "),
        ({"max_model_len": 16}, {}, "reads 16 tokens; start it with --max-model-len "),
        ({}, {"bridge": "adapter"}, "started without --enable-lora, which engine.bridge=adapter needs"),
        (
            {"dtype": "bfloat16"},
            {"bridge": "shared"},
            "its weights are bfloat16, and float32 by engine.dtype and policy.compute_dtype; start it with "
            "--dtype float32",
        ),
        ({}, {"bridge": "shared", "compute_dtype": "bfloat16"}, "its weights are float32, and bfloat16 by "),
        ({}, {"dtype": "float16"}, "its weights are float32, and float16 by "),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(world, facts, settings, line):
    with serving(**facts) as url, pytest.raises(ConfigError) as caught:
        connect_servers(settings_of(url, **settings), world, StopRequest(world.store))

    text = str(caught.value)
    assert text.startswith(f"engine.urls={url}: ") and "\n" not in text
    assert line in text


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"bridge": "shared"}, {"compute_dtype": "bfloat16"}])
def test_weights_of_another_type_are_accepted_where_they_are_cast(world, settings):
    with serving() as url:
        servers = connect_servers(settings_of(url, **settings), world, StopRequest(world.store))
    assert [server.url for server in servers] == [url]


LOADS_THE_LAST_MODEL_ALONE = f"""
import json, os, sys
sys.exit(1 if json.load(open(os.environ["{STATE_VARIABLE}"]))["{REQUESTED}"] else 0)
"""


def test_a_model_that_cannot_be_served_costs_one_start(tmp_path, capsys):
    """Before, a request for a model that does not load ended the server after four starts."""
    state = tmp_path / "state.json"
    save_ready(state, "first", 9001)
    save_requested(state, "broken")
    assert resumed(parse(["first"]), state).model == "broken"
    assert servers._run([sys.executable, "-c", LOADS_THE_LAST_MODEL_ALONE], state) == 0
    assert (resumed(parse(["first"]), state).model, resumed(parse(["first"]), state).port) == ("first", 9001)
    assert "note: broken could not be served; the model before it is loaded again" in capsys.readouterr().out


def test_an_adapter_leaves_nothing_in_the_kv_cache(tmp_path):
    """A NaN in an unused slot of a block reaches the sequence that gets the block: zero times NaN is NaN."""
    caches, resets = [torch.full([2, 3], torch.nan) for _ in range(3)], []
    runner = SimpleNamespace(kv_caches=[caches[0], [caches[1], caches[2]]])
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config="any"),
        model_executor=executor,
        add_lora=lambda request: True,
        remove_lora=lambda number: True,
        reset_prefix_cache=lambda: resets.append("of the base model too"),
    )
    adapters = VLLMAdapters(engine)
    adapters.load("a", str(tmp_path))
    for cache in caches:
        cache.fill_(torch.nan)
    assert adapters.unload()["adapter_name"] is None
    assert not torch.stack(caches).any()
    assert len(resets) == 2
