"""Night actions of every role, and their order of resolution."""

from __future__ import annotations

import pytest

from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.town.roles import ROLES, Faction, Priority
from colocated_grpo.environments.town.state import NO_SEAT, Phase
from tests.support.town_tables import dead, events_of, judged, kinds, night, private_texts, seat, table


def test_there_are_at_least_twelve_roles_in_three_factions():
    assert len(ROLES) >= 12
    for faction in Faction:
        assert sum(role.faction is faction for role in ROLES.values()) >= 5


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


@pytest.mark.parametrize(("blocked", "victim"), [("Ada", "Elin"), ("Bram", "Dorn")])
def test_with_one_of_two_killers_blocked_the_other_kills_alone(blocked, victim):
    game = table("godfather", "mafioso", "barkeep")
    night(game, {"Ada": "kill Dorn", "Bram": "kill Elin", "Cleo": f"distract {blocked}"})
    assert dead(game) == {victim}


def test_a_block_prevents_a_kill():
    game = table("mafioso", "barkeep")
    night(game, {"Ada": "kill Cleo", "Bram": "distract Ada"})
    assert not dead(game)
    assert any("did nothing" in text for text in private_texts(game, "Ada"))


def test_a_block_from_the_mafia_stops_a_healer():
    game = table("mafioso", "charmer", "doctor")
    night(game, {"Ada": "kill Dorn", "Bram": "distract Cleo", "Cleo": "protect Dorn"})
    assert dead(game) == {"Dorn"}


def test_blockers_cannot_be_blocked():
    game = table("mafioso", "charmer", "barkeep")
    night(game, {"Ada": "kill Dorn", "Bram": "distract Cleo", "Cleo": "distract Ada"})
    assert not dead(game)


def test_a_doctor_saves_from_the_mafia():
    game = table("mafioso", "doctor")
    night(game, {"Ada": "kill Cleo", "Bram": "protect Cleo"})
    assert not dead(game)
    assert any("lived" in text for text in private_texts(game, "Cleo"))
    assert any("survived" in text for text in private_texts(game, "Ada"))


def test_a_bodyguard_dies_with_the_killer_and_saves_the_host():
    game = table("mafioso", "bodyguard")
    night(game, {"Ada": "kill Cleo", "Bram": "guard Cleo"})
    assert dead(game) == {"Ada", "Bram"}


def test_a_doctor_saves_a_bodyguard_who_intervenes():
    game = table("slayer", "bodyguard", "doctor")
    night(game, {"Ada": "kill Dorn", "Bram": "guard Dorn", "Cleo": "protect Bram"})
    assert dead(game) == {"Ada"}


@pytest.mark.parametrize("target", ["mafioso", "framer", "slayer"])
def test_a_sheriff_finds_killers_suspicious(target):
    game = table("sheriff", target)
    night(game, {"Ada": "investigate Bram"})
    assert private_texts(game, "Ada") == ["suspicious"]


@pytest.mark.parametrize("target", ["godfather", "citizen", "jester"])
def test_a_sheriff_finds_the_godfather_and_harmless_roles_not_suspicious(target):
    game = table("sheriff", target)
    night(game, {"Ada": "investigate Bram"})
    assert private_texts(game, "Ada") == ["not suspicious"]


def test_a_frame_fools_the_sheriff_for_one_night():
    game = table("sheriff", "framer")
    night(game, {"Ada": "investigate Cleo", "Bram": "frame Cleo"})
    night(game, {"Ada": "investigate Cleo"})
    assert private_texts(game, "Ada") == ["suspicious", "not suspicious"]


def test_a_lookout_sees_visitors_except_itself():
    game = table("lookout", "doctor", "mafioso")
    night(game, {"Ada": "watch Dorn", "Bram": "protect Dorn", "Cleo": "kill Dorn"})
    assert private_texts(game, "Ada") == ["visited by Bram, Cleo"]


def test_a_tracker_sees_the_visit_of_its_target():
    game = table("tracker", "mafioso")
    night(game, {"Ada": "track Bram", "Bram": "kill Cleo"})
    night(game, {"Ada": "track Dorn"})
    assert private_texts(game, "Ada") == ["called on Cleo", "called on nobody"]


def test_a_blocked_action_is_no_visit():
    game = table("tracker", "mafioso", "barkeep")
    night(game, {"Ada": "track Bram", "Bram": "kill Dorn", "Cleo": "distract Bram"})
    assert private_texts(game, "Ada") == ["called on nobody"]


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


def test_a_veteran_on_alert_kills_every_visitor_and_survives():
    game = table("veteran", "mafioso", "doctor")
    night(game, {"Ada": "alert", "Bram": "kill Ada", "Cleo": "protect Ada"})
    assert dead(game) == {"Bram", "Cleo"}
    assert seat(game, "Ada").uses == {"alert": 2}


def test_a_survivor_in_a_vest_outlives_an_attack():
    game = table("survivor", "mafioso")
    night(game, {"Ada": "vest", "Bram": "kill Ada"})
    assert not dead(game)
    night(game, {"Bram": "kill Ada"})
    assert dead(game) == {"Ada"}


def test_ordinary_attacks_do_not_kill_godfather_slayer_or_arsonist():
    game = table("vigilante", "vigilante", "vigilante", "godfather", "slayer", "arsonist")
    night(game, {"Ada": "shoot Dorn", "Bram": "shoot Elin", "Cleo": "shoot Fitz"}, day=2)
    assert not dead(game)


def test_a_cleaned_victim_keeps_role_and_will_secret():
    game = table("mafioso", "cleaner", "sheriff")
    seat(game, "Cleo").will = "Ada is guilty"
    night(game, {"Ada": "kill Cleo", "Bram": "clean Cleo"})
    assert events_of(game, "killed")[0].text == "unknown"
    assert seat(game, "Cleo").hidden_end


def test_a_silenced_seat_cannot_speak_on_the_next_day():
    game = table("silencer")
    night(game, {"Ada": "silence Bram"})
    game.phase = Phase.DISCUSSION
    assert judged(game, "Bram", reply("speak", "help")).code == "muted"
    assert judged(game, "Bram", reply("whisper", "Cleo: help")).code == "muted"
    game.phase, game.acquitted = Phase.NOMINATION, [index for index in game.living() if index != game.index("Bram")]
    assert judged(game, "Bram", reply("nominate", "Cleo")).code == "not_your_turn_to"


def test_an_arsonist_kills_every_doused_seat_despite_a_doctor():
    game = table("arsonist", "doctor")
    night(game, {"Ada": "douse Cleo"})
    night(game, {"Ada": "douse Dorn"})
    night(game, {"Ada": "ignite", "Bram": "protect Cleo"})
    assert dead(game) == {"Cleo", "Dorn"}


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


def test_jail_protects_from_fire():
    game = table("jailor", "arsonist")
    seat(game, "Cleo").doused = True
    night(game, {"Bram": "ignite"}, jailed="Cleo")
    assert not dead(game)


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


def test_an_executioner_whose_mark_dies_by_night_becomes_a_jester():
    game = table("executioner", "mafioso")
    seat(game, "Ada").mark = game.index("Cleo")
    night(game, {"Bram": "kill Cleo"})
    assert (seat(game, "Ada").role_name, seat(game, "Ada").mark) == ("jester", NO_SEAT)


@pytest.mark.parametrize(("hater", "mark"), [("Cleo", "Dorn"), ("Dorn", "Cleo")])
def test_an_executioner_who_dies_with_its_mark_stays_an_executioner(hater, mark):
    game = table("mafioso", "slayer")
    seat(game, hater).become("executioner")
    seat(game, hater).mark = game.index(mark)
    night(game, {"Ada": f"kill {hater}", "Bram": f"kill {mark}"})
    assert dead(game) == {hater, mark}
    assert {event.text for event in events_of(game, "killed")} == {"executioner", "citizen"}
    assert private_texts(game, hater) == []


def test_night_choices_are_recorded_but_not_shown_to_any_seat():
    game = table("mafioso")
    night(game, {"Ada": "kill Bram"})
    assert events_of(game, "action")[0].audience == ()
    assert "killed" in kinds(game)


def test_only_attacks_have_attack_power():
    for role in ROLES.values():
        for ability in role.abilities:
            assert (ability.attack > 0) == (ability.priority is Priority.ATTACK), role.name
