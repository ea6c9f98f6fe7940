"""The critic's loss, against its definition."""

import pytest
import torch

from agentrl.algorithm import Totals, value_loss


def test_the_loss_is_the_larger_of_two_squares():
    values = torch.tensor([[1.0, 2.0, 0.0, 5.0]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 3.0, torch.nan]])
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = value_loss(values=values, old_values=old, returns=returns, mask=mask, cliprange_value=0.5)
    loss.backward()
    # Moved from 1 to 2, the clipped value is 1.5; from 1 to 0 it is 0.5, which is nearer to 3 than 0 is.
    assert loss.item() == pytest.approx((1 + 4 + 9) / 2 / 3)
    assert values.grad is not None
    assert values.grad.tolist() == [pytest.approx([1 / 3, 2 / 3, -1, 0])]
    assert {name: (total / count).item() for name, (total, count) in metrics.items()} == pytest.approx(
        {"critic/value_mean": 1.0, "critic/clip_fraction": 0.0, "critic/error": 14 / 3}
    )


def test_a_value_that_ran_ahead_has_no_gradient():
    values = torch.tensor([[2.0]], requires_grad=True)
    loss, metrics = value_loss(
        values=values,
        old_values=torch.tensor([[0.0]]),
        returns=torch.tensor([[3.0]]),
        mask=torch.ones(1, 1),
        cliprange_value=0.5,
    )
    loss.backward()
    assert loss.item() == pytest.approx(2.5**2 / 2) and values.grad is not None and not values.grad.any()
    assert metrics["critic/clip_fraction"][0].item() == 1


def test_shares_add_up():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 2, 4, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    whole, _ = value_loss(values=values, old_values=old, returns=returns, mask=mask, cliprange_value=0.2)
    parts = [
        value_loss(
            values=values[[i]],
            old_values=old[[i]],
            returns=returns[[i]],
            mask=mask[[i]],
            cliprange_value=0.2,
            totals=Totals.count(mask),
        )[0]
        for i in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_wrong_input_is_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="cliprange_value is 0"):
        value_loss(values=x, old_values=x, returns=x, mask=x, cliprange_value=0)
    with pytest.raises(ValueError, match="returns has shape"):
        value_loss(values=x, old_values=x, returns=x[:, :1], mask=x, cliprange_value=1)
