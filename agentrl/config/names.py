"""The names of the algorithms a configuration can ask for, so that a typo is found without importing torch.

They are verl's. `agentrl/algorithm` registers a function under each of them; a test compares the two.
"""

from __future__ import annotations

ADV_ESTIMATORS = (
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "tir_optimal_token_baseline",
)
"""Values of `algorithm.adv_estimator`."""

GROUP_BASELINES = frozenset(ADV_ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
"""Estimators that compare an episode with the others of its group: a group of one teaches them nothing."""

COMPARE_EPISODES = GROUP_BASELINES - {"optimal_token_baseline", "tir_optimal_token_baseline"}
"""Estimators that compare what whole episodes earned, wherever and in whichever branch. For the others it matters where
a reward stands."""

NEEDS_PROXIMAL = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that need a forward before the update."""

LOSS_MODES = (
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
)
"""Values of `actor.loss_mode`."""

LOSS_AGG_MODES = (
    "episode-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "token-sum",
)
"""Values of `actor.loss_agg_mode`."""

SEQUENCE_MEANS = ("gspo", "sapo")
"""Losses that only exist as a mean over sequences of means over tokens."""

CLIPPING = ("vanilla", "bypass_mode", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov")
"""Losses with a clip range."""

RATIO_TERMS = {
    "sapo": "the gate (actor.tau_pos, actor.tau_neg)",
    "kl_cov": "the penalty (actor.kl_cov_ratio, actor.ppo_kl_coef)",
    "dro": "the quadratic term (actor.dro_beta)",
}
"""What other losses do with a ratio, and not at a ratio of 1."""

CHOOSE_TOKENS = ("clip_cov", "kl_cov")
"""Losses that choose among the tokens of a micro-batch."""

DUAL_CLIPPING = ("vanilla", "bypass_mode", "dppo_tv", "dppo_kl")
"""Losses that read `actor.clip_ratio_c`."""

LOSS_CONSTANTS = {
    "tau_pos": "sapo",
    "tau_neg": "sapo",
    "clip_cov_ratio": "clip_cov",
    "clip_cov_lb": "clip_cov",
    "clip_cov_ub": "clip_cov",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "dro_beta": "dro",
}
"""Keys of `actor` that one loss alone reads."""

ESTIMATOR_CONSTANTS = {
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk", "gdpo"),
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "gae_timestep": ("gae",),
    "gdpo_reward_keys": ("gdpo",),
    "gdpo_reward_weights": ("gdpo",),
}
"""Keys of `algorithm` that only these estimators read."""

KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Values of `actor.kl_loss_type`, which may end with a `+`."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of LoRA adapters that vLLM makes room for."""

VLLM_HIGHEST_TEMPERATURE = 2.0
"""Above it vLLM refuses a request."""

ENGINE_ARGUMENTS = {
    "vllm": {
        "model": "model.path",
        "dtype": "model.dtype",
        "max_model_len": "rollout.max_model_len",
        "max_num_seqs": "rollout.max_batch_size",
        "kv_cache_memory_bytes": "rollout.kv_cache_tokens",
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "rollout.tensor_parallel_size"),
        "data_parallel_size": "rollout.n_gpus_per_node, for more engines",
        "load_format": "agentrl's own need: the first tokens are sampled by the model's own weights",
        "seed": "data.seed",
        **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_dtype"), "model.lora_merge"),
        **dict.fromkeys(("weight_transfer_config", "worker_extension_cls"), "weights.transport"),
        "logprobs_mode": "agentrl's own need: log-probs of the distribution sampled from",
        "generation_config": "agentrl's own need: sampling as the config says",
        "structured_outputs_config": "agentrl's own need: guided answers that end with their request's stop tokens",
        "disable_log_stats": "agentrl's own need: its counters",
    },
    "sglang": {
        **dict.fromkeys(("model_path", "model"), "model.path"),
        **dict.fromkeys(("host", "port"), "rollout.engine_urls, for a server that is started elsewhere"),
        **dict.fromkeys(("tp_size", "tensor_parallel_size", "tp"), "rollout.tensor_parallel_size"),
        **dict.fromkeys(("dp_size", "data_parallel_size", "dp"), "rollout.n_gpus_per_node, for more engines"),
        **dict.fromkeys(("pp_size", "pipeline_parallel_size", "pp"), "rollout.tensor_parallel_size"),
        "dtype": "model.dtype",
        "device": "trainer.device",
        "context_length": "rollout.max_model_len",
        "max_running_requests": "rollout.max_batch_size",
        "max_total_tokens": "rollout.kv_cache_tokens",
        "random_seed": "data.seed",
        "weight_version": "nothing: versions are the trainer's",
        "skip_tokenizer_init": "nothing: rollout.stop needs the tokenizer",
        "allow_auto_truncate": "rollout.max_model_len",
        "constrained_json_disable_any_whitespace": "nothing: guided answers must not fill with whitespace",
    },
}
"""Arguments of an engine that agentrl gives itself, by engine, and what says them."""

OUTSIDE_AGENT = "agentrl:OutsideAgent"
"""The agent of `agentrl serve`: whoever asks for an episode over HTTP."""
