"""The guide from Atropos' trainer: its flags, defaults, settings, files, metrics and commands are those of the code."""

from __future__ import annotations

import re
import shlex

import pytest

from colocated_grpo.launch.launcher import main
from colocated_grpo.settings.errors import dotted, setting_names
from colocated_grpo.settings.names.atropos_command import FLAGS
from colocated_grpo.settings.schema import Config
from tests.support.paths import ROOT
from tests.support.training_runs import tiny_model

GUIDE = (ROOT / "docs/guides/from_atropos.md").read_text()
EXPLAINED = (ROOT / "docs/guides/metrics.md").read_text()
COMMANDS = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)]


def rows(section: str) -> list[list[str]]:
    """Return the cells of the rows of a section's tables, without their headers."""
    text = GUIDE.split(f"## {section}\n")[1].split("\n## ")[0]
    bodies = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for body in bodies for line in body.splitlines()]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_flag_is_listed_with_its_default():
    listed = {name: cells for cells in rows("Flags") for name in spans(cells[0])}
    for flag in FLAGS:
        names = [name for name in flag.names if name in listed]
        assert names == list(flag.names)
        default = " ".join(flag.default) if flag.kind is list else str(flag.default)
        shown = listed[flag.names[0]][1]
        assert shown == default or (shown in ("", "required") and not flag.default)
    assert {name for name in listed if name.startswith("--")} == {name for flag in FLAGS for name in flag.names}


@pytest.mark.parametrize("section", ["Modes", "Flags"])
def test_the_settings_named_in_the_tables_exist(section: str):
    known = {dotted(path) for path, _ in setting_names(Config)} | {"policy.lora"}
    named = {span.partition(":")[0] for cells in rows(section) for span in spans(cells[-1]) + spans(cells[1])}
    settings = {name for name in named if "." in name and "/" not in name}
    assert len(settings) >= 2
    assert settings <= known


def test_the_metrics_of_the_table_are_explained():
    ours = [name for cells in rows("Metrics") for name in spans(cells[1])]
    assert len(ours) > 12
    explained = EXPLAINED.replace("`seconds/<phase>`", "`seconds/sync` `seconds/generate`")
    assert [name for name in ours if f"`{name}`" not in explained] == []


def test_the_files_of_the_table_exist():
    ours = [name for cells in rows("Files of the trainer") for name in spans(cells[1])]
    assert len(ours) > 12
    assert [name for name in ours if not (ROOT / "colocated_grpo" / name).exists()] == []


def test_quoted_log_lines_exist():
    source = "\n".join(file.read_text() for file in (ROOT / "colocated_grpo").rglob("*.py"))
    quoted = [span for cells in rows("Log lines") for span in spans(cells[1]) if " " in span or "=" in span]
    assert len(quoted) > 4
    for span in quoted:
        pattern = r"[^\n]*".join(map(re.escape, re.split(r"\.\.\.|\d+/\d+", span)))
        assert re.search(pattern, source), span


def test_the_first_command_is_valid(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert COMMANDS[0][:2] == ["colocated-grpo", "atropos"]
    first = COMMANDS[0][1:]
    first[first.index("--model-name") + 1] = str(tiny_model())  # the Hub's cannot be read offline
    assert main(first) == 0
    assert "Dry run mode" in capsys.readouterr().out


def test_the_replacement_of_tossims_command_is_the_one_that_the_image_names():
    _, direct, docker = COMMANDS
    assert direct[:4] == ["torchrun", "--nproc_per_node=4", "-m", "colocated_grpo"]
    assert (ROOT / direct[-1]).is_file()
    assert shlex.split(docker[-1]) == direct
    assert "torchrun --nproc_per_node=N -m colocated_grpo --config FILE" in (ROOT / "docker/entrypoint.sh").read_text()
