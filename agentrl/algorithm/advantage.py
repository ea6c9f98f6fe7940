"""Advantage estimators, computed once over the global batch, before it is cut into micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

# These register the estimators.
from agentrl.algorithm import group_advantages, optimal_baseline, token_advantages  # noqa: F401
from agentrl.algorithm.estimators import ESTIMATORS, AdvantageConfig, AdvantageInputs
from agentrl.algorithm.layout import Layout
from agentrl.algorithm.masking import is_trained, masked, require_same_shape
from agentrl.algorithm.registry import describe

__all__ = ["ESTIMATORS", "AdvantageConfig", "AdvantageInputs", "compute_advantages"]


@torch.no_grad()
def compute_advantages(
    estimator: str,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    layout: Layout,
    config: AdvantageConfig,
    values: Tensor | None = None,
    logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    baselines: Tensor | None = None,
    reward_parts: dict[str, Tensor] | None = None,
    sum_pi_squared: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the trained tokens of a global batch.

    Of a group's outcomes, the same for all tokens of an episode:

    | estimator | advantage |
    |---|---|
    | `grpo` | (score - group mean) / (group std + 1e-6), arXiv:2402.03300; without std: arXiv:2503.20783 |
    | `grpo_passk` | of the best episode (best - second best) / (group std + 1e-6), else 0, arXiv:2503.19595 |
    | `gdpo` | `grpo` of each part of the reward, weighted sum, whitened over all tokens, arXiv:2601.05242 |
    | `rloo` | score - mean of the other members, arXiv:2402.14740 |
    | `reinforce_plus_plus_baseline` | score - group mean, whitened over all tokens, arXiv:2501.03262 |
    | `opo` | score - group mean weighted by episode lengths, arXiv:2505.23585 |
    | `gpg` | (score - group mean) * episodes / episodes with a score other than 0, arXiv:2504.02546 |

    Of what comes after a token in its sequence (G: sum of the rewards from there on):

    | estimator | advantage |
    |---|---|
    | `gae` | generalised advantage over tokens or turns, whitened over all tokens, arXiv:1506.02438 |
    | `reinforce_plus_plus` | discounted G, whitened over all tokens, arXiv:2501.03262 |
    | `remax` | G - reward of a greedy episode of the same task, arXiv:2310.10505 |
    | `optimal_token_baseline` | G - sum(G W) / sum(W) over the group's tokens at the same place, arXiv:2602.07078 |
    | `tir_optimal_token_baseline` | the same, places counted in trained tokens only |

    where W is the sum of 1 - 2p + sum(p^2) over the tokens of a sequence up to that place.

    An episode's score is the mean over its sequences (branches) of the sum of their token rewards, each branch
    carrying the episode's outcome; group statistics count an episode once. A failed member is simply not in
    the batch. A member without a partner has no baseline: its advantage is 0 under every estimator that compares
    the members of a group. Equal scores give exactly 0. Statistics are computed in fp64; call it where the device
    has that, else on CPU tensors.

    Args:
        token_rewards: [B, T] floats; read at trained positions only, so the outcome belongs on a sequence's
            last trained token.
        mask: [B, T], 1 on trained tokens, as it was before rejection or staleness masked any: what those take
            out stays in the statistics.
        layout: the episode and group of each sequence; the turns for `gae` over turns.
        values: [B, T] a critic's value of the state before each trained token; for `gae`.
        logp: [B, T] log-probs (nats) of the policy that anchors the update, `sum_pi_squared`: [B, T] the sum of the
            squares of that policy's probabilities over the vocabulary; for the optimal token baselines.
        importance_weights: [B, T] the weights that the loss will have, where it has any; for the optimal token
            baselines, which then minimise the variance of the weighted gradient.
        ref_logp: [B, T] log-probs of the reference policy, for estimators that need them.
        baselines: [S] reward of a greedy episode of each sequence's task; for `remax`.
        reward_parts: named [B, T] rewards, placed like `token_rewards`; for `gdpo`.

    Returns:
        (advantages, returns), [B, T] in the dtype of `token_rewards`, 0 at masked positions. Estimators without
        a notion of return give the advantages twice. Under `gae` the returns are what the critic learns.

    Raises:
        ValueError: unknown estimator, an input that it needs is missing, shapes that differ, rewards that are not
            floats, an episode whose sequences lie in different groups, or an estimator of the user's that does not
            return two values for each token.
    """
    require_same_shape(
        token_rewards=token_rewards,
        mask=mask,
        sequence=layout.sequence,
        values=values,
        logp=logp,
        ref_logp=ref_logp,
        sum_pi_squared=sum_pi_squared,
        importance_weights=importance_weights,
        **(reward_parts or {}),
    )
    if not token_rewards.is_floating_point():
        raise ValueError(f"token_rewards has dtype {token_rewards.dtype}: pass floats")
    _check_ids(layout, mask)
    result: object = ESTIMATORS.get(estimator)(
        AdvantageInputs(
            token_rewards=token_rewards,
            mask=mask,
            layout=layout,
            config=config,
            values=values,
            logp=logp,
            ref_logp=ref_logp,
            baselines=baselines,
            reward_parts=reward_parts,
            sum_pi_squared=sum_pi_squared,
            importance_weights=importance_weights,
            estimator=estimator,
        )
    )
    match result:
        case (Tensor() as advantages, Tensor() as returns) if advantages.shape == returns.shape == mask.shape:
            kept, dtype = is_trained(mask), token_rewards.dtype
            return masked(advantages.to(dtype), kept), masked(returns.to(dtype), kept)
        case _:
            raise ValueError(
                f"algorithm.adv_estimator {estimator} returned {describe(result)}: return (advantages, returns), one "
                f"of each for each token, {list(mask.shape)}"
            )


def _check_ids(layout: Layout, mask: Tensor) -> None:
    ids = layout.sequence[is_trained(mask)]
    unknown = ids[(ids < 0) | (ids >= layout.sequences)]
    if len(unknown):
        raise ValueError(
            f"layout.sequence holds {int(unknown[0])} at a trained position: layout.episode lists {layout.sequences} "
            f"sequences, whose numbers are 0 to {layout.sequences - 1}"
        )
