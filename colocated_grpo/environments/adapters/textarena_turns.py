"""Games of textarena whose seats are all played, and trained, by the policy: self-play turn by turn.

A turn carries the seed of its game and the moves up to it: whoever judges it plays the game again to that moment and
tries each completion on a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from colocated_grpo.environments.adapters.textarena_game import (
    KEY,
    Script,
    check_known,
    move_of,
    random_move,
    script_of,
)
from colocated_grpo.environments.adapters.textarena_table import (
    ASKED,
    BROKEN,
    CREDITS,
    DRAW,
    POLICY,
    UNFINISHED,
    Table,
    TableSettings,
)
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.turns.credit import win_rates
from colocated_grpo.environments.user_code.loading import construct, resolve_mode

LATEST_GAMES = 100
"""Games over which win rates look back."""
MOST_GAMES = 100
"""Games that may end in a row before the policy is asked, and that may break before the first one does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArenaTurn:
    """The seat whose turn it is."""

    id: str
    game: int
    seat: int
    player: str
    phase: str
    """The seat's role, as a metric can be named: 'mafia', 'player_0'."""
    messages: str
    seed: int
    moves: tuple[str, ...] = field(repr=False)
    """Up to this turn."""

    @property
    def trainable(self) -> bool:
        return self.player == POLICY

    def pattern(self) -> str:
        raise EnvironmentSetupError(f"{KEY}: structured: true needs a grammar, and textarena gives none")


@dataclass(frozen=True, slots=True)
class TextArenaOutcome:
    reward: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class TextArenaReturn:
    turn_id: str
    value: float


class TextArenaTurns:
    """Deterministic: settings, seed and commits decide everything, also across snapshot and restore."""

    def __init__(self, seed: int, **args: Any) -> None:
        self.settings = construct(TableSettings, resolve_mode(args, "credit", CREDITS, KEY), KEY)
        check_known(self.settings.game)
        self._scripts = {
            label: script_of(label, f"{KEY}: args.players") for label in self.settings.players if label not in ASKED
        }
        self._seed = seed
        self._started = 0
        self._returns: list[TextArenaReturn] = []
        self._ended: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._results: list[dict[str, float]] = []
        self._tables = [self._until_asked(self._new_table()) for _ in range(self.settings.games)]

    @property
    def delayed(self) -> bool:
        return self.settings.credit.outcome != 0

    def next_batch(self) -> list[TextArenaTurn]:
        return [self._turn(table) for table in self._tables]

    def add_game(self) -> list[TextArenaTurn]:
        self._tables.append(self._until_asked(self._new_table()))
        return [self._turn(self._tables[-1])]

    def score(self, turn: TextArenaTurn, completions: Sequence[str]) -> list[TextArenaOutcome]:
        table = Table(self.settings, turn.game, turn.seed).replay(turn.moves)
        if table.rewards is not None or table.prompt() != turn.messages:
            raise RuntimeError(f"{self.settings.game} does not repeat itself from its seed and its moves")
        return [self._outcome(table.copy(), turn.seat, move_of(each)) for each in completions]

    def _outcome(self, table: Table, seat: int, move: str) -> TextArenaOutcome:
        """Of a move that is carried out on a table for trials."""
        fine = table.play(move).legal and bool(move)
        end = 0.0 if table.rewards is None else table.rewards[seat]
        reward = end if fine else end + self.settings.invalid_reward
        return TextArenaOutcome(reward, {"parse_rate": float(bool(move)), "legal_rate": float(fine), "end": end})

    def commit(self, turn: TextArenaTurn, completion: str) -> None:
        place = self._place_of(turn)
        self._tables[place].play(move_of(completion), turn.id)
        self._tables[place] = self._until_asked(self._tables[place])

    def play_on(self, turn: TextArenaTurn) -> None:
        place = self._place_of(turn)
        self._scripted_turn(self._tables[place], random_move)
        self._tables[place] = self._until_asked(self._tables[place])

    def drain_returns(self) -> list[TextArenaReturn]:
        returns, self._returns = self._returns, []
        return returns

    def drain_games(self) -> list[dict[str, Any]]:
        ended, self._ended = self._ended, []
        return ended

    def drain_stats(self) -> dict[str, float]:
        """Ended games since the last call; win rates of roles, and of players where there are several kinds."""
        counts, self._counts = self._counts, Counter()
        stats = {name: float(counts[name]) for name in ("games", UNFINISHED, BROKEN)}
        if counts["games"]:
            stats["turns_per_game"] = counts["turns"] / counts["games"]
        for name in sorted({name for result in self._results for name in result}):
            shares = [result[name] for result in self._results if name in result]
            stats[f"win_rate/{name}"] = sum(shares) / len(shares)
        return stats

    def snapshot(self) -> dict[str, Any]:
        """Games are kept as their seed and what was said in them."""
        return {
            "started": self._started,
            "tables": [table.snapshot() for table in self._tables],
            "returns": [asdict(each) for each in self._returns],
            "ended": list(self._ended),
            "counts": dict(self._counts),
            "results": list(self._results),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        if len(snapshot["tables"]) < self.settings.games:
            raise ValueError(f"games={self.settings.games}, but the snapshot holds {len(snapshot['tables'])}")
        self._started = snapshot["started"]
        self._tables = [Table.restored(self.settings, table) for table in snapshot["tables"]]
        self._returns = [TextArenaReturn(**each) for each in snapshot["returns"]]
        self._ended = deepcopy(snapshot["ended"])
        self._counts = Counter(snapshot["counts"])
        self._results = deepcopy(snapshot["results"])

    def _new_table(self) -> Table:
        number = self._started
        self._started += 1
        # Even seeds train and odd ones are held out: a game keeps the side of its environment.
        seed = 2 * Random(f"{self._seed}/{number}").randrange(2**30) + self._seed % 2
        return Table(self.settings, number, seed)

    def _until_asked(self, table: Table) -> Table:
        """Play the scripted seats on, through new games if need be, until a seat played from outside has the turn."""
        for _ in range(MOST_GAMES):
            while table.rewards is None:
                script = self._scripts.get(table.player(table.game.seat))
                if script is None:
                    return table
                self._scripted_turn(table, script)
            self._settle(table)
            table = self._new_table()
        raise RuntimeError(f"{self.settings.game}: {MOST_GAMES} games in a row ended before the policy was asked")

    def _scripted_turn(self, table: Table, script: Script) -> None:
        table.play(script(table.game, Random(f"{table.seed}/{len(table.said)}")))

    def _settle(self, table: Table) -> None:
        """Close the books on an ended game."""
        if self.delayed:
            self._returns += self._returns_of(table)
        self._counts.update({"games": 1, table.ending: 1, "turns": len(table.said)})
        self._ended.append(table.record())
        if table.ending != BROKEN:
            self._results = [*self._results[1 - LATEST_GAMES :], self._result_of(table)]
        elif not self._results and table.number >= MOST_GAMES:
            raise RuntimeError(f"{self.settings.game}: every game breaks; the latest: {table.error}")

    def _returns_of(self, table: Table) -> list[TextArenaReturn]:
        asked = [said for said in table.said if said.turn_id]
        returns = []
        for said, share in zip(asked, self.settings.credit.weights([said.seat for said in asked]), strict=True):
            # The move that ended the game was paid for it when it was judged.
            value = 0.0 if said is table.said[-1] else share * table.rewards[said.seat]
            returns.append(TextArenaReturn(said.turn_id, value))
        return returns

    def _result_of(self, table: Table) -> dict[str, float]:
        """By role, and by player where there are several kinds: the share of their seats that won."""
        seats = list(enumerate(table.rewards))
        results = [(table.game.role(seat), reward) for seat, reward in seats]
        if len(set(self.settings.players)) > 1:
            results += [(table.player(seat).rpartition(":")[2], reward) for seat, reward in seats]
        won = win_rates((_metric_name(name), reward) for name, reward in results)
        return {"draw": float(table.ending == DRAW)} | won

    def _turn(self, table: Table) -> TextArenaTurn:
        seat = table.game.seat
        return TextArenaTurn(
            id=_turn_id(table),
            game=table.number,
            seat=seat,
            player=table.player(seat),
            phase=_metric_name(table.game.role(seat)),
            messages=table.prompt(),
            seed=table.seed,
            moves=tuple(said.move for said in table.said),
        )

    def _place_of(self, turn: TextArenaTurn) -> int:
        for place, table in enumerate(self._tables):
            if _turn_id(table) == turn.id:
                return place
        raise ValueError(f"turn {turn.id}: not open; a turn takes exactly one commit")


def _turn_id(table: Table) -> str:
    return f"{table.number}.{len(table.said)}"


def _metric_name(name: str) -> str:
    """'Player 0' as 'player_0'."""
    return name.lower().replace(" ", "_")
