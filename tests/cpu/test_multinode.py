"""Two launchers, as on two nodes, over loopback."""

from __future__ import annotations

import socket

from training_runs import TrainingRun, settings, tiny_model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_launchers_on_one_host_train_together(tmp_path):
    config = settings(tiny_model(), training_steps=2, evaluation={"every": 0})
    place = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with (
        TrainingRun(tmp_path, config, *place, "--node-rank", "0", name="node0") as first,
        TrainingRun(tmp_path, config, *place, "--node-rank", "1", name="node1") as second,
    ):
        first.finish()
        second.finish()
        assert first.processes() == second.processes() == []
    assert [row["step"] for row in first.rows("train")] == [0, 1]
    assert "2 x CPU" in first.stdout
    assert (first.folder / "final_model/model.safetensors").exists()
    assert "held out" not in second.stdout
