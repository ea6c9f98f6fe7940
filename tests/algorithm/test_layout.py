"""Padded rows and packed rows hold the same sequences; masked positions may say anything about theirs."""

import pytest
import torch

from agentrl.algorithm import Layout
from agentrl.algorithm.layout import TrainedTokens

MASK = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]])


def packed() -> tuple[torch.Tensor, Layout]:
    """The sequences of MASK in one row: sequence 1 first, masked positions with ids that do not exist."""
    mask = torch.tensor([[1, 0, 0, 1, 1, 0, 1, 0]])
    sequence = torch.tensor([[1, -7, 99, 0, 0, 5, 0, 0]])
    return mask, Layout(sequence, torch.tensor([4, 9]), torch.tensor([2, 2]))


def test_rows_number_the_sequences_and_default_to_one_episode_and_group_each():
    layout = Layout.rows(MASK)
    assert layout.sequence.tolist() == [[0] * 6, [1] * 6]
    assert layout.episode.tolist() == [0, 1]
    assert layout.group.tolist() == [0, 1]


def test_rows_without_groups_make_each_episode_a_group():
    assert Layout.rows(MASK, episode=[5, 5]).group.tolist() == [5, 5]


def test_sums_counts_and_spread_agree_for_padded_and_packed_rows():
    padded_values = torch.tensor([[9.0, 1, 2, 9, 9, 3], [10, 9, 9, 9, 9, 9]])
    packed_values = torch.tensor([[10.0, torch.nan, torch.inf, 1, 2, -torch.inf, 3, torch.nan]])
    mask, layout = packed()
    for values, m, rows in ((padded_values, MASK, Layout.rows(MASK)), (packed_values, mask, layout)):
        assert rows.sums(values, m).tolist() == [6, 10]
        assert rows.maxima(values, m).tolist() == [3, 10]
        assert rows.counts(m).tolist() == [3, 1]
    assert layout.spread(torch.tensor([7.0, 8.0]), mask).tolist() == [[8, 0, 0, 7, 7, 0, 7, 0]]


def test_sums_have_no_gradient_at_masked_positions():
    values = torch.tensor([[torch.nan, 1.0]], requires_grad=True)
    mask = torch.tensor([[0, 1]])
    Layout.rows(mask).sums(values, mask).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[0, 1]]


def test_episode_counts_join_branches_and_skip_what_is_all_masked():
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]])
    layout = Layout.rows(mask, episode=[3, 3, 8, 12])
    assert layout.episode_counts(mask).tolist() == [3, 3, 1, 0]
    assert layout.episode_count(mask).item() == 2


def test_an_empty_shard_has_no_sequences():
    mask = torch.zeros(1, 4)
    layout = Layout(torch.zeros(1, 4, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0).long())
    assert layout.sums(torch.ones(1, 4), mask).shape == (0,)
    assert layout.spread(torch.zeros(0), mask).tolist() == [[0, 0, 0, 0]]
    assert layout.episode_count(mask).item() == 0


def test_trained_tokens_align_and_restore():
    mask, layout = packed()
    values = torch.tensor([[10.0, -1, -1, 1, 2, -1, 3, -1]])
    tokens = TrainedTokens.of(layout, mask)
    assert tokens.align(values).tolist() == [[1, 2, 3], [10, 0, 0]]
    assert torch.equal(tokens.restore(tokens.align(values)), values * mask)
    padded = TrainedTokens.of(Layout.rows(MASK), MASK)
    assert padded.align(torch.tensor([[9.0, 1, 2, 9, 9, 3], [10, 9, 9, 9, 9, 9]])).tolist() == [[1, 2, 3], [10, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence": torch.zeros(4, dtype=torch.long)}, "layout.sequence"),
        ({"group": torch.zeros(3, dtype=torch.long)}, "layout.group"),
        ({"episode": torch.zeros(2)}, "layout.episode has dtype"),
    ],
)
def test_wrong_ids_are_refused_by_name(change, message):
    fields = {"sequence": torch.zeros(2, 3, dtype=torch.long), "episode": torch.arange(2), "group": torch.arange(2)}
    with pytest.raises(ValueError, match=message):
        Layout(**{**fields, **change})
