"""Night actions of every role, and their order of resolution."""

from __future__ import annotations

import pytest

from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.town.roles import ROLES, Faction, Priority
from colocated_grpo.environments.town.state import Phase
from tests.support.town_tables import dead, events_of, judged, kinds, night, private_texts, seat, table


def test_there_are_twelve_roles_in_three_factions():
    assert len(ROLES) == 12
    assert [sum(role.faction is faction for role in ROLES.values()) for faction in Faction] == [7, 3, 2]


def test_the_godfather_kills():
    game = table("godfather")
    night(game, {"Ada": "kill Bram"})
    assert dead(game) == {"Bram"}


def test_the_mafioso_carries_out_the_godfathers_kill():
    game = table("godfather", "mafioso", "lookout")
    night(game, {"Ada": "kill Dorn", "Bram": "kill Elin", "Cleo": "watch Dorn"})
    assert dead(game) == {"Dorn"}
    assert private_texts(game, "Cleo") == ["visited by Bram"]


def test_the_mafioso_carries_out_the_kill_even_without_a_choice_of_its_own():
    game = table("godfather", "mafioso", "lookout")
    night(game, {"Ada": "kill Dorn", "Cleo": "watch Dorn"})
    assert private_texts(game, "Cleo") == ["visited by Bram"]


def test_a_doctor_saves_from_the_mafia():
    game = table("mafioso", "doctor")
    night(game, {"Ada": "kill Cleo", "Bram": "protect Cleo"})
    assert not dead(game)
    assert any("lived" in text for text in private_texts(game, "Cleo"))
    assert any("survived" in text for text in private_texts(game, "Ada"))


@pytest.mark.parametrize("target", ["mafioso", "informer", "slayer"])
def test_a_sheriff_finds_killers_suspicious(target):
    game = table("sheriff", target)
    night(game, {"Ada": "investigate Bram"})
    assert private_texts(game, "Ada") == ["suspicious"]


@pytest.mark.parametrize("target", ["godfather", "citizen", "jester"])
def test_a_sheriff_finds_the_godfather_and_harmless_roles_not_suspicious(target):
    game = table("sheriff", target)
    night(game, {"Ada": "investigate Bram"})
    assert private_texts(game, "Ada") == ["not suspicious"]


def test_a_lookout_sees_visitors_except_itself():
    game = table("lookout", "doctor", "mafioso")
    night(game, {"Ada": "watch Dorn", "Bram": "protect Dorn", "Cleo": "kill Dorn"})
    assert private_texts(game, "Ada") == ["visited by Bram, Cleo"]


def test_an_informer_reports_the_exact_role_to_the_whole_mafia():
    game = table("informer", "sheriff", "mafioso")
    night(game, {"Ada": "spy Bram"})
    assert private_texts(game, "Ada") == private_texts(game, "Cleo") == ["sheriff"]
    assert private_texts(game, "Bram") == []


def test_a_vigilante_has_two_bullets_from_the_second_night_on():
    game = table("vigilante")
    game.phase = Phase.NIGHT
    assert judged(game, "Ada", reply("shoot", "Bram")).code == "too_early"
    night(game, {"Ada": "shoot Bram"}, day=2)
    night(game, {"Ada": "shoot Cleo"}, day=3)
    assert dead(game) == {"Bram", "Cleo"}
    assert judged(game, "Ada", reply("shoot", "Dorn")).code == "no_uses_left"


def test_ordinary_attacks_do_not_kill_godfather_or_slayer():
    game = table("vigilante", "vigilante", "godfather", "slayer")
    night(game, {"Ada": "shoot Cleo", "Bram": "shoot Dorn"}, day=2)
    assert not dead(game)


def test_a_slayer_can_kill_the_mafia():
    game = table("slayer", "mafioso")
    night(game, {"Ada": "kill Bram"})
    assert dead(game) == {"Bram"}


def test_jail_keeps_the_prisoner_from_acting_and_from_being_reached():
    game = table("jailor", "mafioso", "slayer")
    game.phase, game.prisoner = Phase.NIGHT, game.index("Bram")
    assert judged(game, "Bram", reply("kill", "Dorn")).code == "jailed"
    night(game, {"Cleo": "kill Bram"}, jailed="Bram")
    assert not dead(game)
    assert any("could not be reached" in text for text in private_texts(game, "Cleo"))


def test_an_execution_kills_the_prisoner_whatever_protects_them():
    game = table("jailor", "godfather", "doctor")
    night(game, {"Ada": "execute"}, jailed="Bram")
    assert dead(game) == {"Bram"}
    assert seat(game, "Ada").uses == {"execute": 2}


def test_without_a_prisoner_execute_has_no_target():
    game = table("jailor")
    game.phase = Phase.NIGHT
    assert judged(game, "Ada", reply("execute")).code == "no_target"


def test_two_killers_can_kill_each_other_in_one_night():
    game = table("vigilante", "mafioso")
    night(game, {"Ada": "shoot Bram", "Bram": "kill Ada"}, day=2)
    assert dead(game) == {"Ada", "Bram"}


def test_night_choices_are_recorded_but_not_shown_to_any_seat():
    game = table("mafioso")
    night(game, {"Ada": "kill Bram"})
    assert events_of(game, "action")[0].audience == ()
    assert "killed" in kinds(game)


def test_only_attacks_have_attack_power():
    for role in ROLES.values():
        if (ability := role.ability) is not None:
            assert (ability.attack > 0) == (ability.priority is Priority.ATTACK), role.name
