"""The losses beside vanilla, each against its definition in plain Python."""

import math

import pytest
import torch

from agentrl.algorithm import Correction, LossConfig, policy_loss, summarise

TOKENS = [(-1.0, -1.1, 0.7), (-0.3, -1.5, -0.4), (-2.0, -1.2, 0.9), (-0.5, -0.6, -1.0), (-1.5, -0.2, -0.6)]
"""(logp, prox_logp, advantage) of a sequence."""
WEIGHTS = [1.0, 0.5, 2.0, 0.25, 1.5]


def evaluate(loss_mode, tokens=TOKENS, weights=None, **config) -> tuple[float, list[float], dict[str, float]]:
    """(sum of the token losses, gradients, metrics) of one sequence."""
    logp, prox, advantages = torch.tensor(tokens, dtype=torch.float64).T[:, None]
    logp = logp.clone().requires_grad_()
    mean = "seq-mean-token-mean" if loss_mode in ("gspo", "sapo") else "token-mean"
    weights = None if weights is None else torch.tensor([weights], dtype=torch.float64)
    loss, metrics = policy_loss(
        loss_mode,
        logp=logp,
        prox_logp=prox,
        behav_logp=prox,
        advantages=advantages,
        mask=torch.ones_like(logp),
        config=LossConfig(loss_agg_mode=mean, **config),
        correction=Correction(weights, torch.ones_like(logp), {}),
    )
    loss.backward()
    assert logp.grad is not None
    count = len(tokens)
    return loss.item() * count, (logp.grad[0] * count).tolist(), summarise(metrics)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_cispo_clips_the_weight_and_keeps_the_gradient(weights):
    loss, gradient, metrics = evaluate("cispo", weights=weights, clip_ratio_low=0.3, clip_ratio_high=0.5)
    w = weights or [1.0] * 5
    clipped = [min(max(math.exp(logp - prox), 0.7), 1.5) for logp, prox, _ in TOKENS]
    expected = [-w[i] * clipped[i] * TOKENS[i][2] for i in range(5)]
    assert gradient == pytest.approx(expected)
    assert loss == pytest.approx(sum(g * token[0] for g, token in zip(expected, TOKENS, strict=True)))
    assert metrics["actor/clip_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gspo_has_one_ratio_for_a_sequence(weights):
    loss, gradient, _ = evaluate("gspo", weights=weights)
    w = weights or [1.0] * 5
    ratio = math.exp(sum(logp - prox for logp, prox, _ in TOKENS) / 5)
    terms = [max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)) for _, _, a in TOKENS]
    free = [terms[i] == -TOKENS[i][2] * ratio for i in range(5)]
    assert loss == pytest.approx(sum(x * y for x, y in zip(w, terms, strict=True)))
    assert gradient == pytest.approx([-w[i] * TOKENS[i][2] * ratio if free[i] else 0 for i in range(5)])


def test_a_mean_over_sequences_refuses_another_aggregation():
    x = torch.zeros(1, 1)
    for mode in ("gspo", "sapo"):
        with pytest.raises(ValueError, match=f"loss_mode {mode} .* set loss_agg_mode to seq-mean-token-mean"):
            policy_loss(mode, logp=x, prox_logp=x, behav_logp=x, advantages=x, mask=x, config=LossConfig())


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_geo_mean_clips_each_token_in_the_logarithm(weights):
    loss, gradient, metrics = evaluate("geo_mean", weights=weights, clip_ratio_low=0.4, clip_ratio_high=0.4)
    plain = [logp - prox for logp, prox, _ in TOKENS]
    kept = [min(d, 0.4) if a > 0 else max(d, -0.4) for d, (_, _, a) in zip(plain, TOKENS, strict=True)]
    weight = math.exp(sum(map(math.log, weights)) / 5) if weights else 1.0
    value = -weight * sum(a for _, _, a in TOKENS) / 5 * math.exp(sum(kept) / 5)
    assert loss == pytest.approx(5 * value, rel=1e-6)
    assert gradient == pytest.approx([value if k == d else 0 for k, d in zip(kept, plain, strict=True)], rel=1e-6)
    assert metrics["actor/clip_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_sapo_bends_the_ratio(weights):
    loss, gradient, metrics = evaluate("sapo", weights=weights, tau_pos=1.0, tau_neg=2.0)
    w = weights or [1.0] * 5
    expected_loss, expected_gradient = 0.0, []
    for i, (logp, prox, a) in enumerate(TOKENS):
        tau, ratio = 1.0 if a > 0 else 2.0, math.exp(logp - prox)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        expected_loss += -w[i] * a * gate * 4 / tau
        expected_gradient.append(-w[i] * a * 4 * gate * (1 - gate) * ratio)
    assert loss == pytest.approx(expected_loss) and gradient == pytest.approx(expected_gradient)
    assert metrics["actor/clip_fraction"] == 0


def binary_kl(before, now) -> float:
    return before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_dppo_leaves_out_what_moved_too_far_with_the_update(mode, weights):
    loss, gradient, metrics = evaluate(
        mode, weights=weights, clip_ratio_low=0.3, clip_ratio_high=0.02, clip_ratio_c=1.05
    )
    w = weights or [1.0] * 5
    expected = []
    for i, (logp, prox, a) in enumerate(TOKENS):
        now, before = math.exp(logp), math.exp(prox)
        if mode == "dppo_tv":
            near = now - before <= 0.02 if a > 0 else now - before >= -0.3
        else:
            moved = binary_kl(before, now)
            near = (moved <= 0.02 or now <= before) if a > 0 else (moved <= 0.3 or now >= before)
        expected.append(-w[i] * a * min(now / before, 1.05) if near else 0.0)
    assert 0 < expected.count(0.0) < 5
    assert gradient == pytest.approx(expected, rel=1e-6)
    assert loss == pytest.approx(sum(g * token[0] for g, token in zip(expected, TOKENS, strict=True)), rel=1e-6)
    assert metrics["actor/clip_fraction"] == pytest.approx(expected.count(0.0) / 5)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gpg_is_reinforce(weights):
    loss, gradient, _ = evaluate("gpg", weights=weights)
    w = weights or [1.0] * 5
    assert gradient == pytest.approx([-w[i] * TOKENS[i][2] for i in range(5)])
    assert loss == pytest.approx(sum(-w[i] * a * logp for i, (logp, _, a) in enumerate(TOKENS)))


def test_dro_pulls_towards_the_anchor():
    loss, gradient, _ = evaluate("dro", dro_beta=0.5)
    assert gradient == pytest.approx([-(a - 0.5 * (logp - prox)) for logp, prox, a in TOKENS])
    assert loss == pytest.approx(sum(-(a * logp - 0.25 * (logp - prox) ** 2) for logp, prox, a in TOKENS))
    with pytest.raises(ValueError, match="dro needs dro_beta"):
        evaluate("dro")


def covariances() -> list[float]:
    mean_logp, mean_a = sum(t[0] for t in TOKENS) / 5, sum(t[2] for t in TOKENS) / 5
    return [(a - mean_a) * (logp - mean_logp) for logp, _, a in TOKENS]


def test_kl_cov_holds_back_the_tokens_of_highest_covariance():
    _, gradient, metrics = evaluate("kl_cov", kl_cov_ratio=0.4, ppo_kl_coef=0.3)
    highest = sorted(range(5), key=covariances().__getitem__)[-2:]
    expected = []
    for i, (logp, prox, a) in enumerate(TOKENS):
        penalty = 0.3 * math.copysign(1, logp - prox) if i in highest else 0.0
        expected.append(-a * math.exp(logp - prox) + penalty)
    assert gradient == pytest.approx(expected)
    assert metrics["actor/clip_fraction"] == pytest.approx(2 / 5)


def test_clip_cov_leaves_out_some_tokens_of_high_covariance():
    everything = {"clip_ratio_low": 1.0, "clip_ratio_high": 100.0}
    bounds = {"clip_cov_lb": sorted(covariances())[2] - 1e-9, "clip_cov_ub": 5.0}
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        _, gradient, metrics = evaluate("clip_cov", clip_cov_ratio=0.4, **everything, **bounds)
        left_out = [i for i in range(5) if gradient[i] == 0]
        assert len(left_out) == 2 and metrics["actor/clip_fraction"] == pytest.approx(2 / 5)
        assert all(covariances()[i] > bounds["clip_cov_lb"] for i in left_out)
        seen |= set(left_out)
    assert len(seen) == 3, "each of the three candidates is drawn sooner or later"


def test_clip_cov_without_a_candidate_is_the_clipped_surrogate():
    ours = evaluate("clip_cov", clip_cov_lb=100.0, clip_cov_ub=200.0, clip_ratio_c=100.0)
    vanilla = evaluate("vanilla", clip_ratio_c=100.0)
    assert ours[0] == pytest.approx(vanilla[0]) and ours[1] == pytest.approx(vanilla[1])
