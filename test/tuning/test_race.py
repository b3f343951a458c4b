"""The race: which candidates drop out, which one wins, and that noise wins nothing. All times are simulated."""

import random

import pytest

from torch_nhwc.tuning.tuner import Race, interval


def run(times, seed=0, noise=0.02, rounds=40, drift=1.0):
    """Return a race of candidates that take so many seconds, with noise that only adds, on a slowing machine."""
    chance = random.Random(seed)
    race = Race(times)

    def measure(name):
        slowed = times[name] * drift**race.rounds
        return slowed * (1 + abs(chance.gauss(0, noise))) * (3 if chance.random() < 0.05 else 1)

    while race.rounds < rounds and not race.is_over():
        race.run_round(measure)
    return race


def test_noise_wins_nothing():
    winners = [run(dict.fromkeys(["base", "a", "b", "c"], 1.0), seed, noise=0.05).winner() for seed in range(40)]
    assert winners.count("base") >= 37


@pytest.mark.parametrize(("slower", "answers"), [(1.3, ["base", "fast"]), (1.2, ["base", "base"])])
def test_two_rounds_decide_only_if_both_are_far_apart(slower, answers):
    race = Race(["base", "fast"])
    for answer in answers:
        race.run_round(lambda name: slower * (1 + race.rounds / 10) if name == "base" else 1.0)
        assert race.winner() == answer


def test_a_race_is_over_once_more_rounds_would_tell_nothing():
    assert run({"base": 1.0, "fast": 0.8}, noise=0.01, rounds=1000).rounds <= 12
    assert run({"base": 1.0, "same": 1.0}, noise=0.002, rounds=1000).rounds <= 40
    assert run({"base": 1.0, "slow": 2.0}, rounds=1000).rounds == 2


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
