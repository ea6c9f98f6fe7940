"""Rewards on their way to advantages."""

import pytest
import torch

from agentrl.algorithm import overlong_penalty, scaled


def test_the_penalty_grows_over_the_buffer():
    lengths = torch.tensor([0, 80, 90, 100, 110])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5)
    assert penalty.tolist() == [0, 0, -0.25, -0.5, -0.75]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"buffer": 0}, "buffer is 0"), ({"buffer": 101}, "1 to 100 tokens"), ({"factor": -1.0}, "positive number")],
)
def test_a_wrong_penalty_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.zeros(1), **{"max_length": 100, "buffer": 20, "factor": 1.0, **settings})


def test_rewards_are_shifted_scaled_and_cut_in_this_order():
    rewards = torch.tensor([0.0, 1.0, 10.0])
    assert scaled(rewards, scale=2, bias=-0.5, clip=3).tolist() == [-1, 1, 3]
    assert scaled(rewards).tolist() == rewards.tolist()
    with pytest.raises(ValueError, match="clip is 0"):
        scaled(rewards, clip=0)
