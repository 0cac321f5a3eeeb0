"""Print stored rollouts or games of a run: colocated-grpo show-rollouts RUN [--best K | --game]"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from colocated_grpo.runtime.program import OneLineParser
from colocated_grpo.servers.options import positive
from colocated_grpo.tracking import files, transcripts
from colocated_grpo.tracking.text import number, printable

INDENT = 4
"""Columns before the policy's text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the selected rollouts or game. Returns exit code 0, or 2 if there are none or the run cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        run_dir = files.run_folder(options.run)
        if options.game is not None:
            return show_game(run_dir, options.game)
        if not (rows := select(files.read_rollouts(run_dir), options)):
            kind = "held-out" if options.evaluation else "training"
            step = "" if options.step is None else f" at step {options.step}"
            raise files.RunFolderError(f"{run_dir}: no {kind} rollouts stored{step}")
    except files.RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    for row in rows:
        console.print(rollout_panel(row, console.encoding))
    return 0


def show_game(run_dir: Path, game_number: int) -> int:
    """Print the transcript of one ended game; -1 is the latest. Raises RunFolderError if there is no such game."""
    ended, name = files.read_games(run_dir), "game"
    games = ended[-1:]
    if game_number >= 0:
        games, name = [game for game in ended if game["game"] == game_number], f"game {game_number}"
    if not games:
        raise files.RunFolderError(f"{run_dir}: no {name} has ended")
    console = Console()
    for game in games:
        console.print(Rule(Text(printable(files.game_title(game), console.encoding))))
        console.print(Text(printable(game.get("transcript", ""), console.encoding)))
    return 0


def select(rollouts: list[files.Row], options: argparse.Namespace) -> list[files.Row]:
    """Return the rollouts of one step, by default the last stored step; with --best or --worst, that many by reward."""
    rows = [row for row in rollouts if row["kind"] == (files.EVALUATION if options.evaluation else files.TRAIN)]
    if not rows:
        return []
    step = rows[-1]["step"] if options.step is None else options.step
    rows = [row for row in rows if row["step"] == step]
    if options.best is not None:
        return sorted(rows, key=_reward, reverse=True)[: options.best]
    return rows if options.worst is None else sorted(rows, key=_reward)[: options.worst]


def rollout_panel(row: files.Row, encoding: str) -> Panel:
    """Render prompt, completion and score of one rollout. Markup and escape sequences in the texts have no effect."""
    facts = f"step {row['step']}  {row['source']}, prompt {row['prompt_index']}  {row['completion_tokens']} tokens"
    title = f"reward {number(row['reward'])}"
    if row.get("advantage") is not None:
        title += f", advantage {number(row['advantage'])}"
    # Show the parts below, not in the panel's title: a title that does not fit is cut.
    parts = "  ".join(f"{name} {number(part)}" for name, part in row["parts"].items())
    below = [Text(printable(parts, encoding), style="bold")] if parts else []
    if row["error"]:
        below.append(Text(printable(row["error"], encoding), style="red"))
    if row["finish_reason"] != "stop":
        below.append(Text(f"finish reason: {row['finish_reason']}", style="yellow"))
    asked, said = (_shown(part, encoding) for part in (transcripts.question(row), transcripts.passages(row)))
    return Panel(
        Group(*asked, Rule(style="dim"), *said, *below),
        title=Text(title, style="bold"),
        subtitle=Text(printable(facts, encoding), style="dim"),
        title_align="left",
        subtitle_align="left",
    )


def _shown(messages: Sequence[transcripts.Passage], encoding: str) -> Iterator[Text | Padding]:
    """Yield each message below its speaker. Text that the policy read is dim; text that it sampled is indented."""
    for speaker, said in messages:
        sampled = speaker == transcripts.POLICY
        text = Text(printable(said, encoding), style="" if sampled else "dim")
        yield Text(speaker, style="bold green" if sampled else "bold cyan")
        yield Padding(text, (0, 0, 0, INDENT)) if sampled else text


def _reward(row: files.Row) -> float:
    return float("-inf") if row["reward"] is None else row["reward"]


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="colocated-grpo show-rollouts", description="Print stored rollouts or games of a run.")
    parser.add_argument("run", help="run folder")
    parser.add_argument("--step", type=int, help="training step, from 0 (default: the last one stored)")
    parser.add_argument("--evaluation", action="store_true", help="held-out rollouts instead of training ones")
    game = "print game N instead of rollouts (default: the latest)"
    parser.add_argument("--game", type=int, nargs="?", const=-1, metavar="N", help=game)
    end = parser.add_mutually_exclusive_group()
    best, worst = "of the recorded rollouts, the K with the highest reward", "the K with the lowest, failed ones first"
    end.add_argument("--best", type=positive, metavar="K", help=best)
    end.add_argument("--worst", type=positive, metavar="K", help=worst)
    return parser


if __name__ == "__main__":
    sys.exit(main())
