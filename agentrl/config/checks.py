"""What a configuration must hold across keys. Each rule names the keys it is about and a value that is valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.metadata import entry_points
from math import ceil
from pathlib import PurePath

from agentrl.config import names
from agentrl.config.errors import Problem
from agentrl.config.ignored import given, ignored_keys
from agentrl.config.schema import RunConfig


def find_problems(config: RunConfig) -> list[Problem]:
    """Everything that makes a well-typed configuration unfit to run, keys that would be ignored included."""
    unnamed = [*_environment_names(config)]
    if unnamed:  # their keys have no dotted names
        return unnamed
    ignored = (problem for problem in ignored_keys(config) if given(config, problem.key))
    rules = (_tasks, _names, _sampling, _rollout, _validation, _credit, _update, _run)
    return [*(problem for rule in rules for problem in rule(config)), *ignored]


def _names(config: RunConfig) -> Iterator[Problem]:
    algorithm, actor = config.algorithm, config.actor
    yield from _known_name("algorithm.adv_estimator", algorithm.adv_estimator, names.ADV_ESTIMATORS, "advantages")
    yield from _known_name("actor.loss_mode", actor.loss_mode, names.LOSS_MODES, "losses")
    yield from _known_name("actor.loss_agg_mode", actor.loss_agg_mode, names.LOSS_AGG_MODES)
    yield from _known_name("critic.loss_agg_mode", config.critic.loss_agg_mode, names.LOSS_AGG_MODES)


def _known_name(key: str, value: str, own: Iterable[str], plugins: str = "") -> Iterator[Problem]:
    """`value` must be one of agentrl's own names, or an entry point of the group `agentrl.<plugins>`."""
    if value in own or (plugins and ":" in value):
        return
    installed = entry_points(group=f"agentrl.{plugins}").names if plugins else ()
    known = sorted({*own, *installed})
    if value not in known:
        near = get_close_matches(value, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        dotted = ", or package.module:function" if plugins else ""
        yield Problem(key, f"{value!r} is not known", f"{hint}known: {', '.join(known)}{dotted}")


def _rollout(config: RunConfig) -> Iterator[Problem]:
    rollout, estimator = config.rollout, config.algorithm.adv_estimator
    if rollout.max_concurrent < config.episodes_per_group:
        greedy = " and the greedy one of algorithm.adv_estimator = remax" if config.plays_greedy else ""
        most = rollout.max_concurrent - config.plays_greedy
        smaller = f", or rollout.n to {most} or less" if most else ""
        yield Problem(
            "rollout.max_concurrent",
            f"is {rollout.max_concurrent}, below rollout.n = {rollout.n}{greedy}: not one group of episodes would fit",
            f"set rollout.max_concurrent to {config.episodes_per_group} or more{smaller}",
            others=("rollout.n",),
        )
    if config.max_lag < config.eta:
        threshold = config.async_training.staleness_threshold
        bound = config.max_lag
        yield Problem(
            "rollout.max_head_offpolicyness",
            f"is {bound}, below async_training.staleness_threshold = {threshold}: more would be admitted "
            "than may still be trained",
            f"set rollout.max_head_offpolicyness to {ceil(config.eta)} or more, or "
            f"async_training.staleness_threshold to {bound} or less",
            others=("async_training.staleness_threshold",),
        )
    if rollout.n == 1 and estimator in names.GROUP_BASELINES:
        yield Problem(
            "rollout.n",
            f"is 1, but algorithm.adv_estimator = {estimator} compares the episodes of a group: every "
            "advantage would be 0",
            "set rollout.n to 2 or more, or algorithm.adv_estimator to reinforce_plus_plus",
            others=("algorithm.adv_estimator",),
        )
    elif rollout.n == 1 and config.filters_zero_variance:
        yield Problem(
            "rollout.filter_zero_variance",
            "is true, but with rollout.n = 1 no group has variance: every group would be dropped",
            "set rollout.filter_zero_variance to false, or rollout.n to 2 or more",
            others=("rollout.n",),
        )
    if config.async_training.on_stale == "requeue" and rollout.max_attempts == 1:
        yield Problem(
            "rollout.max_attempts",
            "is 1, but async_training.on_stale = requeue plays what came too late again",
            "set rollout.max_attempts to 2 or more, or async_training.on_stale to drop",
            others=("async_training.on_stale",),
        )
    yield from _engines(config)
    yield from _lengths(config)
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < rollout.max_model_len:
        yield Problem(
            "rollout.kv_cache_tokens",
            f"is {rollout.kv_cache_tokens}, below rollout.max_model_len = {rollout.max_model_len}: the longest "
            "sequence would not fit",
            f"set rollout.kv_cache_tokens to {rollout.max_model_len} or more, or remove it",
            others=("rollout.max_model_len",),
        )


def _engines(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.n_gpus_per_node % rollout.tensor_parallel_size:
        yield Problem(
            "rollout.n_gpus_per_node",
            f"is {rollout.n_gpus_per_node}, no multiple of rollout.tensor_parallel_size = "
            f"{rollout.tensor_parallel_size}: an engine would lack devices",
            f"set rollout.n_gpus_per_node to {rollout.tensor_parallel_size}, or rollout.tensor_parallel_size to 1",
            others=("rollout.tensor_parallel_size",),
        )
    if rollout.engine == "sglang" and config.weight_transport == "shm":
        yield Problem(
            "weights.transport",
            "is shm, which SGLang's processes do not read",
            "set weights.transport to disk (on one machine its files lie in memory) or collective",
            others=("rollout.engine",),
        )
    if config.publishes_adapters and (rollout.engine != "vllm" or rollout.engine_urls):
        yield Problem(
            "model.lora_merge",
            "is false, but only a vLLM that the run itself starts takes adapters alone",
            "set model.lora_merge to true, or rollout.engine to vllm without rollout.engine_urls",
            others=("rollout.engine", "rollout.engine_urls"),
        )
    largest = names.ADAPTER_RANKS[-1]
    if config.publishes_adapters and config.model.lora_rank > largest:
        yield Problem(
            "model.lora_rank",
            f"is {config.model.lora_rank}, but vLLM takes adapters of rank {largest} at most",
            f"set model.lora_rank to {largest} or less, or model.lora_merge to true",
            others=("model.lora_merge",),
        )
    if rollout.engine == "vllm":
        for key, temperature in (("rollout", rollout.temperature), ("val", config.val.temperature)):
            if temperature > names.VLLM_HIGHEST_TEMPERATURE:
                yield Problem(
                    f"{key}.temperature",
                    f"is {temperature:g}, but rollout.engine is vllm, which takes "
                    f"{names.VLLM_HIGHEST_TEMPERATURE:g} at most",
                    f"set {key}.temperature to {names.VLLM_HIGHEST_TEMPERATURE:g} or less",
                    others=("rollout.engine",),
                )
    if rollout.engine != "torch":
        for name in rollout.engine_args.keys() & names.ENGINE_ARGUMENTS[rollout.engine].keys():
            own = names.ENGINE_ARGUMENTS[rollout.engine][name]
            yield Problem(
                f"rollout.engine_args.{name}",
                f"is what {own} says",
                f"remove it, and set {own}" if "." in own else "remove it",
                others=("rollout.engine",),
            )


def _lengths(config: RunConfig) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = config.rollout.max_model_len
    if prompt + response > longest:
        lower = f"data.max_prompt_length to {longest - response} or less" if response < longest else "the two lower"
        yield Problem(
            "rollout.max_model_len",
            f"is {longest}, below data.max_prompt_length + data.max_response_length = {prompt} + {response}: "
            "the longest turn would not fit the engine",
            f"set rollout.max_model_len to {prompt + response} or more, or {lower}",
            others=("data.max_prompt_length", "data.max_response_length"),
        )


def _tasks(config: RunConfig) -> Iterator[Problem]:
    if not config.mixture:
        yield Problem(
            "data.train",
            "is required",
            "set it to a .jsonl or .parquet file, the hub id of a data set or package.module:function, or give "
            "environments, each with its own",
        )


def _environment_names(config: RunConfig) -> Iterator[Problem]:
    for name in config.environments:
        if not name or "." in name:
            yield Problem("environments", f"{name!r} is no name for an environment", "use a name without dots")


def _sampling(config: RunConfig) -> Iterator[Problem]:
    """Tokens that sampling can't choose have no log-prob under the policy that is trained."""
    for key, value, all_tokens in (("top_p", config.rollout.top_p, 1), ("top_k", config.rollout.top_k, -1)):
        if value != all_tokens:
            yield Problem(
                f"rollout.{key}",
                f"is {value}: training episodes would be sampled from a truncated distribution, and which tokens it "
                "left out is not recorded, so their log-probs could not be trained on",
                f"set rollout.{key} to {all_tokens}; for held-out tasks set val.{key}",
            )


def _validation(config: RunConfig) -> Iterator[Problem]:
    if config.val.top_k == 0:
        yield Problem("val.top_k", "is 0: no token would be left", "set val.top_k to -1 (all tokens), or to 1 or more")
    if config.trainer.test_freq > 0 and not config.validates:
        source = "environments.NAME.val" if config.environments else "data.val"
        yield Problem(
            "trainer.test_freq",
            f"is {config.trainer.test_freq}, but {source} names no held-out tasks",
            f"set {source}, or trainer.test_freq to 0",
            others=(source,),
        )


def _update(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor
    if actor.loss_mode == "bypass_mode" and actor.proximal != "bypass":
        yield Problem(
            "actor.loss_mode",
            f"is bypass_mode, but actor.proximal = {actor.proximal}",
            "set actor.proximal to bypass, or actor.loss_mode to vanilla",
            others=("actor.proximal",),
        )
    correction = config.algorithm.rollout_correction
    if actor.proximal != "recompute":
        over_a_step = {
            "rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
            "m2_threshold": correction.m2_threshold is not None,
        }
        for key in (key for key, used in over_a_step.items() if used):
            yield Problem(
                f"algorithm.rollout_correction.{key}",
                f"is given, but with actor.proximal = {actor.proximal} the ratios of one micro-batch at a time are "
                "known: the loss would depend on actor.ppo_max_token_len_per_gpu",
                "remove it, or set actor.proximal to recompute",
                others=("actor.proximal",),
            )
    yield from _loss(config)
    for section, optim in (("actor", actor.optim), ("critic", config.critic.optim)):
        if optim.lr_scheduler_type != "constant" and config.trainer.total_steps is None:
            yield Problem(
                f"{section}.optim.lr_scheduler_type",
                f"is {optim.lr_scheduler_type}, but without trainer.total_steps the end of the decay is not known",
                f"set trainer.total_steps, or {section}.optim.lr_scheduler_type to constant",
                others=("trainer.total_steps",),
            )
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_steps
    if steps is not None and warmup >= steps:
        yield Problem(
            "trainer.critic_warmup",
            f"is {warmup}, and trainer.total_steps = {steps}: the policy would never be trained",
            f"set trainer.critic_warmup to {steps - 1} or less",
            others=("trainer.total_steps",),
        )


def _loss(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor
    if actor.loss_mode in names.SEQUENCE_MEANS and actor.loss_agg_mode != "seq-mean-token-mean":
        yield Problem(
            "actor.loss_agg_mode",
            f"is {actor.loss_agg_mode}, but actor.loss_mode = {actor.loss_mode} is a mean over sequences",
            "set actor.loss_agg_mode to seq-mean-token-mean",
            others=("actor.loss_mode",),
        )
    weighted = config.algorithm.rollout_correction.loss_type == "reinforce"
    if actor.loss_mode == "gpg" and actor.proximal == "bypass" and not weighted:
        yield Problem(
            "actor.loss_mode",
            "is gpg, in which no ratio to the behaviour policy stands, and actor.proximal = bypass gives it no weight",
            "for the same loss with a weight set algorithm.rollout_correction.loss_type to reinforce and remove "
            "loss_mode, or set actor.proximal to recompute",
            others=("actor.proximal",),
        )
    if actor.loss_mode == "dro" and actor.dro_beta is None:
        yield Problem(
            "actor.dro_beta",
            "is required by actor.loss_mode = dro",
            "set it to a positive number, e.g. 0.1",
            others=("actor.loss_mode",),
        )
    if actor.clip_cov_lb >= actor.clip_cov_ub:
        yield Problem(
            "actor.clip_cov_lb",
            f"is {actor.clip_cov_lb:g}, not below actor.clip_cov_ub = {actor.clip_cov_ub:g}: no token lies between",
            f"set actor.clip_cov_lb below {actor.clip_cov_ub:g}",
            others=("actor.clip_cov_ub",),
        )
    if actor.kl_loss_type.removesuffix("+") not in names.KL_ESTIMATES:
        yield Problem(
            "actor.kl_loss_type",
            f"{actor.kl_loss_type!r} is not known",
            f"set actor.kl_loss_type to one of {', '.join(names.KL_ESTIMATES)}, with or without a trailing +",
        )


def _credit(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.adv_estimator in names.NEEDS_PROXIMAL and config.actor.proximal != "recompute":
        yield Problem(
            "algorithm.adv_estimator",
            f"is {algorithm.adv_estimator}, which needs the policy's whole distributions before the update, but "
            f"actor.proximal = {config.actor.proximal} makes no forward for them",
            "set actor.proximal to recompute, or algorithm.adv_estimator to grpo",
            others=("actor.proximal",),
        )
    if config.plays_greedy and algorithm.reward_norm is not None:
        yield Problem(
            "algorithm.reward_norm",
            "is given, but algorithm.adv_estimator = remax compares rewards with that of a greedy episode, which is in "
            "none of the statistics",
            "remove it, or normalise with algorithm.adv_norm",
            others=("algorithm.adv_estimator",),
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield Problem(
            "algorithm.gdpo_reward_keys",
            "is required by algorithm.adv_estimator = gdpo: rewards have parts that only describe an episode, too",
            "set it to the parts of the reward that are to be earned, e.g. [accuracy]",
            others=("algorithm.adv_estimator",),
        )
    elif algorithm.adv_estimator == "gdpo" and len(set(keys)) < len(keys):
        yield Problem(
            "algorithm.gdpo_reward_keys", "names a part of the reward twice", "name each once, with its weight"
        )
    elif algorithm.adv_estimator == "gdpo" and weights and not any(weights):
        yield Problem(
            "algorithm.gdpo_reward_weights",
            "are all 0: nothing would be learnt",
            "give at least one part a weight other than 0, or remove algorithm.gdpo_reward_weights for 1 each",
        )
    elif algorithm.adv_estimator == "gdpo" and weights and len(weights) != len(keys):
        yield Problem(
            "algorithm.gdpo_reward_weights",
            f"has {len(weights)} numbers for the {len(keys)} names of algorithm.gdpo_reward_keys",
            "give algorithm.gdpo_reward_weights one number for each name, or remove it",
            others=("algorithm.gdpo_reward_keys",),
        )
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(algorithm, key)
        if norm is not None and norm.mean_level is None and norm.std_level is None:
            yield Problem(
                f"algorithm.{key}",
                "subtracts nothing and divides by nothing",
                f"set {key}.mean_level or {key}.std_level to batch or group, or remove it",
            )
    buffer, longest = algorithm.overlong_buffer_len, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield Problem(
            "algorithm.overlong_buffer_len",
            f"is {buffer}, more than data.max_response_length = {longest}: even an empty answer would lose reward",
            f"set it to {longest} or less",
            others=("data.max_response_length",),
        )


def _run(config: RunConfig) -> Iterator[Problem]:
    name = config.trainer.experiment_name
    if PurePath(name).name != name or name in ("", ".", ".."):
        yield Problem(
            "trainer.experiment_name",
            f"{name!r} is not the name of one folder",
            "use a name without slashes; trainer.output_dir says where the folder goes",
        )
