"""Normalisation of rewards and advantages, against the statistics module."""

import statistics

import pytest
import torch

from agentrl.algorithm import NormConfig, normalise


def normalised(values, groups=None, where=None, dtype=torch.float64, **config) -> list[float]:
    values = torch.tensor(values, dtype=dtype)
    group = torch.tensor(groups if groups is not None else [0] * len(values))
    where = torch.ones_like(values) if where is None else torch.tensor(where)
    return normalise(values, where, group, NormConfig(**config)).tolist()


def test_leave_one_out():
    result = normalised([0.35] * 7 + [0.0], mean_level="group", mean_leave1out=True, std_level=None)
    assert result == pytest.approx([0.05] * 7 + [-0.35])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3])
@pytest.mark.parametrize("level", ["batch", "group"])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_values_give_exactly_zero(dtype, reward, level, leave_one_out):
    settings = {"mean_level": level, "std_level": level, "mean_leave1out": leave_one_out}
    assert normalised([reward] * 8, dtype=dtype, **settings) == [0] * 8


@pytest.mark.parametrize("unbiased", [True, False])
def test_groups_have_their_own_statistics(unbiased):
    values, groups = [1.0, 0.0, 0.5, 3.0, 7.0], [2, 2, 2, 9, 9]
    spread = statistics.stdev if unbiased else statistics.pstdev
    expected = []
    for members in ([1.0, 0.0, 0.5], [3.0, 7.0]):
        expected += [(x - statistics.mean(members)) / (spread(members) + 1e-5) for x in members]
    result = normalised(values, groups, mean_level="group", std_level="group", std_unbiased=unbiased)
    assert result == pytest.approx(expected)


def test_mean_of_the_group_and_spread_of_the_batch():
    values, groups = [1.0, 0.0, 5.0, 7.0], [0, 0, 1, 1]
    centred = [0.5, -0.5, -1.0, 1.0]
    spread = (sum(x * x for x in centred) / 3) ** 0.5 + 1e-5
    result = normalised(values, groups, mean_level="group", std_level="batch")
    assert result == pytest.approx([x / spread for x in centred])


def test_a_single_value_is_its_own_mean():
    assert normalised([4.0], mean_level="group", mean_leave1out=True, std_level="group") == [0]


def test_nothing_subtracted_nothing_divided():
    assert normalised([4.0, 1.0], mean_level=None, std_level=None) == [4, 1]


def test_what_does_not_count_is_not_read():
    result = normalised([1.0, torch.nan, 3.0, torch.inf], where=[1, 0, 1, 0], std_level=None)
    assert result == [-1, 0, 1, 0]


def test_tokens_weigh_the_batch_by_their_number():
    values = torch.tensor([[1.0, 1.0, 1.0], [0.0, 9.0, 9.0]])
    where = torch.tensor([[1, 1, 1], [1, 0, 0]])
    result = normalise(values, where, torch.zeros(2, 3, dtype=torch.long), NormConfig(std_level=None))
    assert result.tolist() == [[0.25, 0.25, 0.25], [-0.75, 0, 0]]


@pytest.mark.parametrize(
    ("config", "message"), [({"mean_level": "all"}, "mean_level"), ({"eps": 0.0}, "greater than 0")]
)
def test_a_wrong_setting_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        NormConfig(**config)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\[2\], \[3\], \[2\]"):
        normalise(torch.zeros(2), torch.ones(3), torch.zeros(2), NormConfig())
