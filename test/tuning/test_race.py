"""The race: who drops out, who wins, and that noise wins nothing. All times are simulated."""

import random

import pytest

from torch_nhwc.tuning.intervals import interval
from torch_nhwc.tuning.race import Race


def run(times, seed=0, noise=0.02, rounds=40, drift=1.0, fixed=None):
    """A race of candidates that take so many seconds, with noise that only adds, on a machine that gets slower."""
    chance = random.Random(seed)
    race = Race(times)

    def measure(name):
        slowed = times[name] * drift**race.rounds
        return slowed * (1 + abs(chance.gauss(0, noise))) * (3 if chance.random() < 0.05 else 1)

    while race.rounds < rounds and not race.is_over():
        race.run_round(measure)
    return race


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drift", [1.0, 1.03])
def test_the_fastest_wins_on_a_machine_that_is_disturbed(seed, drift):
    race = run({"base": 1.0, "slow": 1.2, "fast": 0.9, "other": 0.97}, seed, drift=drift)
    assert race.winner(["base", "slow", "fast", "other"]) == "fast"
    assert race.compare("fast", "base").high < 0.95


def test_what_loses_drops_out_and_the_best_two_stay_with_the_baseline():
    race = run({"base": 1.0, "worst": 1.5, "slow": 1.2, "second": 0.91, "fast": 0.9}, rounds=20)
    assert sorted(race.running) == ["base", "fast", "second"]
    assert race.standing("worst").samples == 2
    assert race.standing("base").samples == race.standing("fast").samples == race.rounds


def test_noise_wins_nothing():
    names = ["base", "a", "b", "c"]
    winners = [run(dict.fromkeys(names, 1.0), seed, noise=0.05).winner(names) for seed in range(40)]
    assert winners.count("base") >= 37


def test_what_a_search_found_has_to_beat_the_best_fixed_policy_with_its_whole_interval():
    fixed = ["base", "fixed"]
    assert run({"base": 1.0, "fixed": 0.9, "found": 0.8}).winner(fixed) == "found"
    assert run({"base": 1.0, "fixed": 0.9, "found": 0.9}).winner(fixed) == "fixed"
    assert run({"base": 1.0, "fixed": 1.0, "found": 1.0}).winner(fixed) == "base"


def test_two_rounds_decide_where_both_are_far_apart():
    for slower, answers in ((1.3, ["base", "fast"]), (1.2, ["base", "base"])):
        race = Race(["base", "fast"])
        for answer in answers:
            race.run_round(lambda name: slower * (1 + race.rounds / 10) if name == "base" else 1.0)
            assert race.winner(["base", "fast"]) == answer


def test_those_that_enter_later_are_compared_by_the_rounds_that_both_were_in():
    race = Race(["base"])
    for speed in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0):
        if race.rounds == 3:
            race.enter(["late"])
        race.run_round(lambda name, speed=speed: speed * (0.9 if name == "late" else 1.0) + race.rounds * 1e-4)
    assert race.compare("late", "base").ratio == pytest.approx(0.9, rel=1e-3)
    assert race.winner(["base"]) == "late"


def test_one_that_raises_is_out_and_the_baseline_s_error_is_the_caller_s():
    race = Race(["base", "broken", "fine"])

    def measure(name):
        if name == failing:
            raise RuntimeError("view size is not compatible\nwith something")
        return 1.0

    failing = "broken"
    for _ in range(5):
        race.run_round(measure)
    assert race.failures == {"broken": "RuntimeError: view size is not compatible"}
    assert race.running == ["base", "fine"]
    assert race.measured == ["base", "fine"]
    failing = "base"
    with pytest.raises(RuntimeError, match="view size"):
        race.run_round(measure)


def test_every_other_round_goes_the_other_way():
    race, order = Race(["a", "b", "c"]), []
    for _ in range(2):
        race.run_round(lambda name: order.append(name) or 1.0)
    assert "".join(order) == "abccba"


def test_a_round_that_gets_late_ends_and_the_first_does_not():
    race = Race(["a", "b"])
    for _ in range(2):
        race.run_round(lambda name: 1.0, is_late=lambda: True)
    assert [race.standing(name).samples for name in "ab"] == [1, 1]


def test_a_race_is_over_once_more_rounds_would_tell_nothing():
    assert run({"base": 1.0, "fast": 0.8}, noise=0.01, rounds=1000).rounds <= 12
    assert run({"base": 1.0, "same": 1.0}, noise=0.002, rounds=1000).rounds <= 40


def test_an_interval_holds_the_true_ratio_and_says_nothing_on_one_pair():
    chance = random.Random(0)
    inside = 0
    for _ in range(300):
        limits = interval([1.1 * (1 + chance.gauss(0, 0.03)) for _ in range(10)])
        inside += limits.low < 1.1 < limits.high
    assert inside >= 290
    assert not interval([0.5]).is_faster
    assert interval([0.5]).low == 0
    assert interval([0.9] * 5).is_faster
