"""The coefficient of the KL penalty in the reward."""

import pytest

from agentrl.trainer.kl_control import KLController


def test_the_coefficient_is_steered_towards_the_target():
    fixed, adaptive = KLController(0.1), KLController(0.1, target_kl=0.5, horizon=100)
    for controller in (fixed, adaptive):
        controller.update(0.55, episodes=10)
    assert fixed.value == 0.1
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    adaptive.value = 0.1
    adaptive.update(50.0, episodes=10)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 10 / 100)), "one step is bounded"
