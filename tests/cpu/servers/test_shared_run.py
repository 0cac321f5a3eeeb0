"""A trainer that computes with the weights of an engine server: one copy, and the result of a co-located run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from colocated_grpo.errors import RunError
from colocated_grpo.servers.exported import CONFIG_NAME, attach, export, move_to_shared_memory
from colocated_grpo.tracking import files
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import ForkedRun, LaunchedRun, held_sorting, settings, tiny_model

SHARED = {"placement": "server", "bridge": "shared"}
EXACT = ("reward", "loss", "grad_norm", "mismatch/plain", "completion_tokens")


def run_settings(**changes: Any) -> dict[str, Any]:
    return settings(tiny_model(), training_steps=6, rollout={"prompts_per_step": 8}, **changes)


def shared_pages(pid: int) -> int:
    """Return the proportional set size, in bytes, of the mapped weights in a process; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    sizes = [re.search(r"\nPss: +(\d+) kB", entry) for entry in entries if "memfd:colocated_grpo" in entry]
    return sum(int(size[1]) * 1024 for size in sizes if size is not None)


def test_one_copy_of_the_weights_gives_the_result_of_a_colocated_run(tmp_path):
    alone = ForkedRun(tmp_path / "alone", run_settings(weights="shared"))
    with alone:
        alone.finish()
    bytes_of_model = sum(tensor.nbytes for tensor in load_file(alone.folder / "final_model/model.safetensors").values())

    def both_processes_have_one_copy() -> bool:
        """True for the engine's process and the rank, when neither has begun to map the weights during the look."""
        pages = [size for process in served.processes() if (size := shared_pages(process.pid))]
        return len(pages) == 2 and sum(pages) < 1.3 * bytes_of_model

    seen = tmp_path / "seen"
    held = held_sorting(hold_before=3, until=str(seen))
    with LaunchedRun(tmp_path / "served", run_settings(engine=SHARED, environments=held)) as served:
        served.wait_until(served.folder.exists)  # until then, a look at all processes costs more than it can show
        served.wait_until(both_processes_have_one_copy)
        seen.touch()
        served.finish()
    for key in EXACT:
        values = [[row.get(key) for row in run.rows(files.TRAIN)] for run in (alone, served)]
        assert values[0] == values[1], key
    final = [load_file(run.folder / "final_model/model.safetensors") for run in (alone, served)]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
        self.second.weight = self.first.weight


def write_through(_world: Any, file: Path) -> list[float]:
    """Change each exported tensor in another process. Returns its first values there, before the change."""
    views = attach(file, "i")
    before = [view.flatten()[0].item() for view in views.values()]
    for view in views.values():
        view.fill_(3.0)
    return before


def test_a_write_by_another_process_changes_the_model(tmp_path):
    model = Tied()
    before = [parameter.flatten()[0].item() for parameter in model.parameters()]
    move_to_shared_memory(model)
    assert model.first.weight is model.second.weight
    folder = tmp_path / "not" / "there"
    file = export({name: p.data for name, p in model.named_parameters()}, {"instance": "i"}, folder)
    assert file == folder / CONFIG_NAME
    assert run_on_ranks(write_through, 1, file) == [before]
    assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in model.parameters())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file/logs"
    with pytest.raises(
        RunError, match=rf"^LOGDIR='{folder}': cannot write {CONFIG_NAME} \(Not a directory\); set LOGDIR"
    ):
        export({}, {}, folder)


def entry(file: Path) -> dict[str, Any]:
    return {"handle": {"file": str(file), "bytes": 64}, "dtype": "float32", "shape": [16], "stride": [1], "offset": 0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        ("{", "not usable"),
        ("{}", "not usable"),
        (json.dumps({"instance": "another", "param_mappings": {}}), "another server, or another start"),
    ],
)
def test_a_file_without_this_servers_weights_is_one_line(content, reason, tmp_path):
    file = tmp_path / CONFIG_NAME
    if content is not None:
        file.write_text(content)
    with pytest.raises(RunError, match=rf"^engine.bridge_config={file}: [^\n]*{reason}[^\n]*$"):
        attach(file, "i")


def test_weights_are_not_written_into_other_files(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"x" * 64)
    file = tmp_path / CONFIG_NAME
    file.write_text(json.dumps({"instance": "i", "param_mappings": {"a": entry(notes)}}))
    with pytest.raises(RunError, match="not usable"):
        attach(file, "i")
    assert notes.read_bytes() == b"x" * 64
