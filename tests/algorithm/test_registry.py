"""Functions are added from outside the library, by name, without an edit inside."""

from importlib import metadata
from importlib.metadata import EntryPoint

import pytest
import torch

from agentrl.algorithm import LossConfig, UnknownNameError, policy_loss
from agentrl.algorithm.loss import LOSSES
from agentrl.algorithm.registry import Registry


def test_a_loss_registered_elsewhere_is_found_by_name():
    @LOSSES.register("test_negative_logp")
    def negative_logp(inputs):
        return -inputs.logp, {}

    ones = torch.ones(1, 2)
    loss, _ = policy_loss(
        "test_negative_logp",
        logp=-ones,
        prox_logp=ones,
        behav_logp=ones,
        advantages=ones,
        mask=ones,
        config=LossConfig(),
    )
    assert loss.item() == 1


def test_a_function_of_another_package_is_found_by_its_entry_point(monkeypatch):
    offered = EntryPoint(name="largest", value="builtins:max", group="agentrl.colours")
    monkeypatch.setattr(metadata, "entry_points", lambda group, name: [offered] if name == "largest" else [])
    registry: Registry = Registry("colour", entry_points="agentrl.colours")
    assert registry.get("largest") is max
    with pytest.raises(UnknownNameError):
        registry.get("smallest")


def test_a_taken_name_is_refused_and_an_unknown_one_lists_the_known():
    registry: Registry = Registry("colour")
    registry.register("red", "crimson")(max)
    registry.register("red")(max)
    with pytest.raises(ValueError, match="colour 'red' is already registered"):
        registry.register("red")(min)
    with pytest.raises(UnknownNameError, match="unknown colour 'blue': use one of crimson, red"):
        registry.get("blue")
