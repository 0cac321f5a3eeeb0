"""Judges a reply against the state of the game, applies it, and rewards it. Seats change a game only through this code.

Rewards are for a reply's form, for how it serves the seat's side (shaping), and for the outcome of the game.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pydantic import Field

from colocated_grpo.environments.town import legality, texts
from colocated_grpo.environments.town.phases import channels, end_turn, nominate, seat_result
from colocated_grpo.environments.town.roles import Faction
from colocated_grpo.environments.town.state import NO_SEAT, Game, Phase
from colocated_grpo.environments.turns.base import Return
from colocated_grpo.settings.base import Section


class Status(IntEnum):
    """Class of a reply. The value is the reward for form."""

    MALFORMED = -1
    ILLEGAL = 0
    OK = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged reply. A reply whose status is not OK has the effect of WAIT."""

    status: Status
    code: str
    """'ok', or the error code."""
    detail: str
    tag: str = legality.WAIT
    argument: str = ""
    """The chosen option, in its canonical spelling."""
    text: str = ""
    think: str = ""


def judge(game: Game, seat: int, completion: str) -> Verdict:
    """Judge a completion. Pure."""
    reply = legality.parse(completion)
    if isinstance(reply, legality.Problem):
        return Verdict(Status.MALFORMED, reply.code, reply.detail)
    legal = legality.legal_actions(game, seat)
    if reply.tag in legal:
        resolved = _resolve_argument(game, seat, reply, legal[reply.tag])
    else:
        resolved = legality.rejection(game, seat, reply.tag)
    if isinstance(resolved, legality.Problem):
        return Verdict(Status.ILLEGAL, resolved.code, resolved.detail, think=reply.think)
    return Verdict(Status.OK, "ok", "", reply.tag, *resolved, think=reply.think)


def _resolve_argument(
    game: Game, seat: int, reply: legality.Reply, spec: legality.ArgumentSpec
) -> tuple[str, str] | legality.Problem:
    """Return the argument and text of a Verdict. Options are found without regard to case."""
    named, text = reply.argument, reply.argument if spec.text else ""
    if spec.options and spec.text:
        named, _, text = (part.strip() for part in reply.argument.partition(":"))
        if not text:
            return legality.Problem("no_addressee", f"write <{reply.tag}>name: text</{reply.tag}>")
    by_folded = {option.casefold(): option for option in spec.options}
    if spec.options and named.casefold() not in by_folded:
        return _wrong_option(game, seat, named, spec.options)
    if len(text) > game.rules.max_speech:
        return legality.Problem("too_long", f"{len(text)} characters, at most {game.rules.max_speech}")
    return by_folded.get(named.casefold(), ""), text


def _wrong_option(game: Game, seat: int, named: str, options: tuple[str, ...]) -> legality.Problem:
    for index, other in enumerate(game.seats):
        if other.name.casefold() == named.casefold():
            if index == seat:
                return legality.Problem("target_self", "not yourself")
            if not other.alive:
                return legality.Problem("target_dead", f"{other.name} is dead")
            return legality.Problem("target_not_allowed", f"{other.name} is no choice for this")
    return legality.Problem("target_not_found", f"{named[:20]!r} is none of {', '.join(options)}")


MAX_RECORDED_THOUGHT = 500


def apply_verdict(game: Game, seat: int, verdict: Verdict, completion: str) -> str | None:
    """Apply a judged reply. A look-up leaves the turn open and returns an observation. Other replies end the turn."""
    holder = game.seats[seat]
    holder.acted += 1
    if verdict.think:
        thought = legality.clean_line(verdict.think[:MAX_RECORDED_THOUGHT])
        game.announce("thought", actor=seat, text=thought, audience=())
    if verdict.status is not Status.OK:
        game.announce("rejected", actor=seat, text=f"{verdict.code}: {verdict.detail}", audience=[seat])
    elif verdict.tag in legality.LOOK_UP_TAGS:
        observation = texts.look_up(game, seat, verdict.tag, verdict.argument or verdict.text)
        holder.dialog.append((completion, observation))
        return observation
    else:
        _act(game, seat, verdict)
    holder.dialog = []
    end_turn(game, seat)
    return None


def _act(game: Game, seat: int, verdict: Verdict) -> None:
    """Carry out an action, or store a choice. All choices of a phase take effect together when the phase closes."""
    match verdict.tag:
        case legality.WAIT:
            return
        case "speak":
            _speak(game, seat, verdict.text)
        case "whisper":
            target = game.index(verdict.argument)
            game.announce("whisper", actor=seat, target=target, text=verdict.text, audience=[seat, target])
            game.announce("whispered", actor=seat, target=target)
        case "reveal":
            game.seats[seat].revealed = True
            game.announce("revealed", actor=seat)
        case "nominate":
            nominate(game, seat, game.index(verdict.argument))
        case _:
            game.choices[seat] = (verdict.tag, verdict.argument)


def _speak(game: Game, seat: int, text: str) -> None:
    kind, channel = "speech", None
    if game.phase is Phase.NIGHT_TALK:
        channel = next(channel for channel in channels(game) if seat in channel)
        if game.prisoner not in channel:
            kind = "mafia_chat"
        else:
            kind = "prisoner_says" if seat == game.prisoner else "jailor_says"
    # The prisoner must not learn which seat is the jailor.
    game.announce(kind, actor=NO_SEAT if kind == "jailor_says" else seat, text=text, audience=channel)


_SHAPING = {
    **dict.fromkeys(("jail", "kill", "shoot", "execute", "guilty"), -0.5),
    **dict.fromkeys(("protect", "innocent"), 0.5),
    "nominate": -0.25,
}
"""Value of an action, or of a vote, whose target's survival is worth 1 to the seat's side. All values are below 1.0,
the gap between an illegal and a legal reply, so form comes first."""
_INVESTIGATION = dict.fromkeys(("investigate", "watch", "spy"), 0.1)
"""Value of an action on any target."""


class Credit(Section):
    """Weights of the parts of a reward."""

    form: float = 1.0
    """Weight of the reply's form: -1 malformed, 0 illegal, +1 legal."""
    shaping: float = 0.0
    """Weight of the shaping term, which is -0.5 to 0.5: how well a legal action serves its seat's side."""
    outcome: float = 0.0
    """Weight of the outcome. At 0, turns train without waiting for their game to end."""
    discount: float = Field(1.0, gt=0, le=1)
    """The weight is multiplied by this factor for each later turn of the same seat."""


CREDITS = {
    "immediate": Credit(),
    "phase": Credit(shaping=1.0),
    "terminal": Credit(outcome=1.0),
    "mix": Credit(shaping=0.5, outcome=0.5, discount=0.97),
}
"""Credit by the name in `args.credit`."""


def shaping(game: Game, seat: int, verdict: Verdict) -> float:
    """Return how well a legal action serves the seat's side, in [-0.5, 0.5]. Pure; reads the roles of all seats."""
    value = _SHAPING.get(verdict.argument if verdict.tag == "vote" else verdict.tag, 0.0)
    if value == 0.0:
        return _INVESTIGATION.get(verdict.tag, 0.0)
    if verdict.tag == "vote":
        target = game.accused
    else:
        target = game.index(verdict.argument) if verdict.argument else game.prisoner  # an execution
    return value * interest_in_survival(game, seat, target)


def interest_in_survival(game: Game, seat: int, other: int) -> float:
    """Return the value of the other seat's survival to the seat's side, in [-1, 1]; -1 if the side wants it dead."""
    one, two = game.seats[seat], game.seats[other]
    if one.role.faction is Faction.NEUTRAL:
        return -1.0 if one.role.hostile else 0.0
    if one.role.faction is Faction.MAFIA:
        return 1.0 if two.role.faction is Faction.MAFIA else -1.0
    if two.role.faction is Faction.TOWN:
        return 1.0
    # Hanging a jester lets it win; hanging another harmless neutral only wastes the trial.
    return -1.0 if two.role.hostile else 0.5 * (two.role_name == "jester")


def outcome_returns(game: Game, credit: Credit) -> list[Return]:
    """Return the returns of an ended game, one for each committed turn, in the order of the commits."""
    later: Counter[int] = Counter()
    returns = []
    for turn_id, seat in reversed(game.turns):
        weight = credit.outcome * credit.discount ** later[seat]
        returns.append(Return(turn_id, weight * seat_result(game, seat)))
        later[seat] += 1
    return returns[::-1]


WIN_RATE_GAMES = 100
"""Number of latest games that win rates cover."""


@dataclass(slots=True)
class TownStats:
    """Counts since the last reset, for metrics that the trainer does not compute. Field names are checkpoint keys."""

    codes: dict[str, int] = field(default_factory=dict)
    """Rejected replies by error code."""
    games: int = 0
    days: int = 0
    winners: list[str] = field(default_factory=list)
    """Winner of each of the latest games: a faction or 'draw'. Kept across resets: few games end in one step."""
    won: dict[str, list[float]] = field(default_factory=dict)
    """By player: the fraction of the player's seats that won, for each of the latest games. Kept across resets."""
    tags: dict[str, int] = field(default_factory=dict)
    """Legal actions by tag."""

    def add_turn(self, verdict: Verdict) -> None:
        """Add a committed turn."""
        legal = verdict.status is Status.OK
        counts, key = (self.tags, verdict.tag) if legal else (self.codes, verdict.code)
        counts[key] = counts.get(key, 0) + 1

    def add_game(self, winner: str, days: int, results: Sequence[tuple[str, float]]) -> None:
        """Add an ended game. results: (player, +1 won, 0 draw, -1 lost) for each seat."""
        self.games += 1
        self.days += days
        self.winners = [*self.winners[1 - WIN_RATE_GAMES :], str(winner)]
        for player in dict.fromkeys(player for player, _ in results):
            wins = [result > 0 for each, result in results if each == player]
            self.won[player] = [*self.won.get(player, [])[1 - WIN_RATE_GAMES :], sum(wins) / len(wins)]

    def rates(self) -> dict[str, float]:
        """Return the metrics by name. A rate without data is left out rather than reported as zero."""
        turns = sum(self.tags.values()) + sum(self.codes.values())
        rates: dict[str, float] = {"turns": turns, "games": self.games}
        if turns:
            rates["look_up_rate"] = sum(self.tags.get(tag, 0) for tag in legality.LOOK_UP_TAGS) / turns
        if self.games:
            rates["days_per_game"] = self.days / self.games
        for winner, count in sorted(Counter(self.winners).items()):
            rates[f"win_rate/{winner}"] = count / len(self.winners)
        for player, shares in sorted(self.won.items()):
            rates[f"win_rate/{player}"] = sum(shares) / len(shares)
        rates |= {f"error/{code}": count / turns for code, count in sorted(self.codes.items())}
        rates |= {f"action/{tag}": count / turns for tag, count in sorted(self.tags.items())}
        return rates
