"""verl's key names (0.9; its trainer, and `fully_async_policy`) and what they are here.

What several keys say together is in `verl_groups.py` and `foreign_groups.py`.
"""

from __future__ import annotations

from typing import Any

from agentrl.config.foreign import NOT_GIVEN, Absent, Fixed, Renamed, Row, flag

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
BUFFERS = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
"""The sections of a penalty for length, in verl's versions."""


def one_source(value: Any) -> Any:
    """A list of one file is that file.

    Raises:
        ValueError: several files.
    """
    if not isinstance(value, list):
        return value
    if len(value) == 1:
        return value[0]
    raise ValueError(f"names {len(value)} files, and agentrl reads one: join them, or name a function that reads all")


def off_if_negative(value: Any) -> Any:
    """verl's -1 says that the setting is not used."""
    return NOT_GIVEN if _is_number(value) and value < 0 else value


def zero_if_negative(value: Any) -> Any:
    """verl's -1 for "never", which is 0 here."""
    return 0 if _is_number(value) and value < 0 else value


def all_if_zero(value: Any) -> Any:
    """Of `top_k`: 0 is all tokens too, with the Hugging Face rollout."""
    return -1 if value == 0 and _is_number(value) else value


def greedy_unless(value: Any) -> Any:
    """Of `do_sample`: false is temperature 0; true leaves the temperature as it is."""
    return NOT_GIVEN if flag(value) else 0.0


def without_console(value: Any) -> Any:
    """Of `logger`: progress is always shown."""
    return [name for name in value if name != "console"] if isinstance(value, list) else value


def not_vectorized(value: Any) -> Any:
    """Of `adv_estimator`: verl has two under another name as well, which computes the same."""
    return value.removesuffix("_vectorized") if value in ("grpo_vectorized", "rloo_vectorized") else value


def proximal_of_bypass(value: Any) -> Any:
    """Of `bypass_mode`."""
    return "bypass" if flag(value) else "recompute"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


VERL: tuple[Row, ...] = (
    # model and data
    Renamed(f"{MODEL}.path", ("model.path",)),
    Renamed(f"{MODEL}.lora.merge", ("model.lora_merge",)),
    Renamed(f"{ROLLOUT}.dtype", ("model.dtype",)),
    Renamed("data.train_files", ("data.train",), one_source),
    Renamed("data.val_files", ("data.val",), one_source),
    Renamed("data.val_max_samples", ("val.limit",), off_if_negative),
    Renamed(f"{ROLLOUT}.prompt_length", ("data.max_prompt_length",)),
    Renamed(f"{ROLLOUT}.response_length", ("data.max_response_length",)),
    # rollout
    Renamed(f"{ROLLOUT}.name", ("rollout.engine",)),
    Renamed(f"{ROLLOUT}.n", ("rollout.n",)),
    Renamed(f"{ROLLOUT}.temperature", ("rollout.temperature",)),
    Renamed(f"{ROLLOUT}.top_p", ("rollout.top_p",)),
    Renamed(f"{ROLLOUT}.top_k", ("rollout.top_k",), all_if_zero),
    Renamed(f"{ROLLOUT}.max_model_len", ("rollout.max_model_len",)),
    Renamed(f"{ROLLOUT}.max_num_seqs", ("rollout.max_batch_size",)),
    Renamed(f"{ROLLOUT}.n_gpus_per_node", ("rollout.n_gpus_per_node",)),
    Renamed(f"{ROLLOUT}.tensor_model_parallel_size", ("rollout.tensor_parallel_size",)),
    Renamed(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", ("weights.bucket_mb",)),
    Renamed(f"{ROLLOUT}.val_kwargs.n", ("val.n",)),
    Renamed(f"{ROLLOUT}.val_kwargs.temperature", ("val.temperature",)),
    Renamed(f"{ROLLOUT}.val_kwargs.top_p", ("val.top_p",)),
    Renamed(f"{ROLLOUT}.val_kwargs.top_k", ("val.top_k",), all_if_zero),
    Renamed(f"{ROLLOUT}.val_kwargs.do_sample", ("val.temperature",), greedy_unless),
    # algorithm
    Renamed("algorithm.rollout_correction.bypass_mode", ("actor.proximal",), proximal_of_bypass, shared=True),
    Renamed("algorithm.filter_groups.enable", ("rollout.filter_zero_variance",)),
    Renamed("algorithm.adv_estimator", ("algorithm.adv_estimator",), not_vectorized, shared=True),
    Renamed("algorithm.gamma", ("algorithm.gamma",), shared=True),
    Renamed("algorithm.lam", ("algorithm.lam",), shared=True),
    Renamed("algorithm.gdpo_reward_keys", ("algorithm.gdpo_reward_keys",), shared=True),
    Renamed("algorithm.gdpo_reward_weights", ("algorithm.gdpo_reward_weights",), shared=True),
    # update
    Renamed(f"{ACTOR}.ppo_mini_batch_size", ("actor.ppo_mini_batch_size",)),
    Renamed(f"{ACTOR}.ppo_max_token_len_per_gpu", ("actor.ppo_max_token_len_per_gpu",)),
    Renamed(f"{ACTOR}.clip_ratio_c", ("actor.clip_ratio_c",)),
    Renamed(f"{ACTOR}.policy_loss.clip_cov_ratio", ("actor.clip_cov_ratio",)),
    Renamed(f"{ACTOR}.policy_loss.clip_cov_lb", ("actor.clip_cov_lb",)),
    Renamed(f"{ACTOR}.policy_loss.clip_cov_ub", ("actor.clip_cov_ub",)),
    Renamed(f"{ACTOR}.policy_loss.kl_cov_ratio", ("actor.kl_cov_ratio",)),
    Renamed(f"{ACTOR}.policy_loss.ppo_kl_coef", ("actor.ppo_kl_coef",)),
    Renamed(f"{ACTOR}.policy_loss.dro_beta", ("actor.dro_beta",)),
    Renamed(f"{ACTOR}.tau_pos", ("actor.tau_pos",)),
    Renamed(f"{ACTOR}.tau_neg", ("actor.tau_neg",)),
    Renamed(f"{ACTOR}.entropy_coeff", ("actor.entropy_coeff",)),
    Renamed(f"{ACTOR}.loss_agg_mode", ("actor.loss_agg_mode",)),
    Renamed(f"{ACTOR}.loss_scale_factor", ("actor.loss_scale_factor",)),
    Renamed(f"{ACTOR}.grad_clip", ("actor.grad_clip",)),
    Renamed(f"{ACTOR}.optim.clip_grad", ("actor.grad_clip",)),
    Renamed(f"{ACTOR}.optim.lr", ("actor.optim.lr",)),
    Renamed(f"{ACTOR}.optim.lr_warmup_steps", ("actor.optim.lr_warmup_steps",), off_if_negative),
    Renamed(f"{ACTOR}.optim.lr_scheduler_type", ("actor.optim.lr_scheduler_type",)),
    Renamed(f"{ACTOR}.optim.warmup_style", ("actor.optim.lr_scheduler_type",)),
    Renamed(f"{ACTOR}.optim.min_lr_ratio", ("actor.optim.min_lr_ratio",)),
    Renamed(f"{ACTOR}.optim.betas", ("actor.optim.betas",)),
    Renamed(f"{ACTOR}.optim.weight_decay", ("actor.optim.weight_decay",)),
    Renamed("critic.model.path", ("critic.path",)),
    Renamed("critic.optim.clip_grad", ("critic.grad_clip",)),
    Renamed("critic.optim.lr_warmup_steps", ("critic.optim.lr_warmup_steps",), off_if_negative, shared=True),
    # run
    Renamed("trainer.total_training_steps", ("trainer.total_steps",)),
    Renamed("trainer.save_freq", ("trainer.save_freq",), zero_if_negative, shared=True),
    Renamed("trainer.test_freq", ("trainer.test_freq",), zero_if_negative, shared=True),
    Renamed("trainer.logger", ("trainer.logger",), without_console, shared=True),
    # what agentrl always does, or never
    Fixed("data.gen_batch_size", (1, None), "tasks are dispatched one by one"),
    Fixed("data.train_max_samples", (-1, None), "all training tasks are used"),
    Fixed("data.return_raw_chat", (True,), "prompts are conversations"),
    Fixed("data.validation_shuffle", (False,), "held-out tasks are played in their order"),
    Fixed("data.trust_remote_code", (False,), "code that comes with a model is not run"),
    Fixed(f"{MODEL}.trust_remote_code", (False,), "code that comes with a model is not run"),
    Fixed(f"{MODEL}.use_remove_padding", (True,), "sequences are packed without padding"),
    Fixed(f"{MODEL}.enable_gradient_checkpointing", (False,), "activations are kept"),
    Fixed(f"{MODEL}.use_shm", (False,), "models are read from where they are"),
    Fixed("actor_rollout_ref.hybrid_engine", (False,), "trainer and engines are processes of their own"),
    Fixed(f"{ROLLOUT}.mode", ("async",), "generation is asynchronous"),
    Fixed(f"{ROLLOUT}.nnodes", (0, 1, None), "a run is on one machine"),
    Fixed("rollout.nnodes", (1, None), "a run is on one machine"),
    Fixed(f"{ROLLOUT}.do_sample", (True,), "training needs sampled episodes"),
    Fixed(f"{ROLLOUT}.ignore_eos", (False,), "a turn ends at the end token"),
    Fixed(f"{ROLLOUT}.calculate_log_probs", (True,), "the log-probs of sampled tokens are always recorded"),
    Fixed(
        f"{ROLLOUT}.logprobs_mode", ("processed_logprobs",), "recorded log-probs are those of the distribution sampled"
    ),
    Fixed(f"{ROLLOUT}.data_parallel_size", (1,), "rollout.n_gpus_per_node says how many engines there are"),
    Fixed(f"{ROLLOUT}.expert_parallel_size", (1,), "there is no expert parallelism"),
    Fixed(f"{ROLLOUT}.pipeline_model_parallel_size", (1,), "there is no pipeline parallelism"),
    Fixed("algorithm.use_pf_ppo", (False,), "there is no PF-PPO"),
    Fixed(
        "algorithm.filter_groups.max_num_gen_batches", (0, None), "rollout.max_untrainable_groups bounds the refills"
    ),
    Fixed(f"{ACTOR}.use_rollout_log_probs", (True,), "the log-probs recorded at sampling are always used"),
    Fixed(f"{ACTOR}.use_dynamic_bsz", (True,), "micro-batches are cut by tokens"),
    Fixed(f"{ACTOR}.ppo_epochs", (1,), "a batch is trained once"),
    Fixed(f"{ACTOR}.shuffle", (False,), "mini-batches are taken in the order of the batch"),
    Fixed(f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "there is one trainer rank"),
    Fixed(f"{ACTOR}.optim.optimizer", ("AdamW",), "the optimiser is AdamW"),
    Fixed(f"{ACTOR}.optim.lr_warmup_steps_ratio", (0, None), "the warm-up is actor.optim.lr_warmup_steps long"),
    Fixed(f"{ACTOR}.optim.total_training_steps", (-1, None), "the horizon of the decay is trainer.total_steps"),
    Fixed("critic.optim.lr_warmup_steps_ratio", (0, None), "the warm-up is critic.optim.lr_warmup_steps long"),
    Fixed("critic.optim.total_training_steps", (-1, None), "the horizon of the decay is trainer.total_steps"),
    Fixed("critic.optim.optimizer", ("AdamW",), "the optimiser is AdamW"),
    Fixed("critic.loss_scale_factor", (None,), "seq-mean-token-sum-norm divides by data.max_response_length there"),
    Fixed(f"{ACTOR}.calculate_sum_pi_squared", (True, False), "it is computed where the estimator needs it"),
    Fixed("critic.use_dynamic_bsz", (True,), "micro-batches are cut by tokens"),
    Fixed("critic.ppo_epochs", (1,), "a batch is trained once"),
    Fixed("critic.shuffle", (False,), "mini-batches are taken in the order of the batch"),
    Fixed("trainer.n_gpus_per_node", (1, None), "there is one trainer rank (engines: rollout.n_gpus_per_node)"),
    Fixed("trainer.nnodes", (1, None), "a run is on one machine"),
    Fixed("trainer.val_only", (False,), "`agentrl train` trains"),
    Fixed("trainer.log_val_generations", (0,), "all trajectories are recorded in the run's folder"),
    Fixed("trainer.resume_mode", ("disable",), "a run starts anew"),
    Fixed("trainer.resume_from_path", (None, False), "a run starts anew"),
    Fixed("async_training.use_trainer_do_validate", (False,), "engines validate"),
    Fixed("async_training.use_dynamic_resource_scheduling", (False,), "trainer and engines keep their devices"),
    # without a counterpart
    Absent("data.val_batch_size", "held-out tasks are dispatched one by one, within rollout.max_concurrent"),
    Absent("data.truncation", "an episode that would exceed data.max_prompt_length ends as `truncated`"),
    Absent("data.filter_overlong_prompts", "an episode that would exceed data.max_prompt_length ends as `truncated`"),
    Absent("data.filter_overlong_prompts_workers", "prompts are not filtered"),
    Absent("data.reward_fn_key", "the environment or the agent judges an episode (env.cls, agent.loop)"),
    Absent("data.custom_cls", "data.train may name a function of yours: package.module:function"),
    Absent("data.tool_config_path", "tools are methods of the environment (env.cls)"),
    Absent("data.dataloader_num_workers", "tasks are kept in memory"),
    Absent("data.apply_chat_template_kwargs", "model.renderer renders conversations"),
    Absent(f"{MODEL}.override_config", "the model's own config.json counts"),
    Absent(f"{MODEL}.external_lib", "modules are imported where a key names them: package.module:Class"),
    Absent(f"{ROLLOUT}.seed", "seeds of requests are derived from data.seed"),
    Absent(
        f"{ROLLOUT}.gpu_memory_utilization",
        "rollout.kv_cache_tokens bounds an engine's cache; vLLM takes this in rollout.engine_args",
    ),
    Absent(f"{ROLLOUT}.max_num_batched_tokens", "rollout.max_batch_size bounds an engine's batch"),
    Absent(f"{ROLLOUT}.enforce_eager", "it is about vLLM's graphs: rollout.engine_args takes it"),
    Absent(f"{ROLLOUT}.free_cache_engine", "trainer and engines do not share a device"),
    Absent(
        f"{ROLLOUT}.enable_chunked_prefill",
        "the torch engine takes whole prompts; vLLM takes it in rollout.engine_args",
    ),
    Fixed(f"{ROLLOUT}.enable_prefix_caching", (True,), "the engine reuses what earlier prompts began with"),
    Absent(f"{ROLLOUT}.load_format", "engines read the model, and then get the trainer's weights"),
    Absent(f"{ROLLOUT}.engine_kwargs", "rollout.engine_args holds them, without the engine's name"),
    Absent(f"{ROLLOUT}.multi_turn", "the agent decides on turns and tools (agent.loop, agent.args, env.cls)"),
    Absent(f"{ROLLOUT}.agent", "the agent is agent.loop"),
    Absent(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent(f"{ROLLOUT}.log_prob_micro_batch_size", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu counts for all forwards"),
    Absent(f"{ROLLOUT}.log_prob_use_dynamic_bsz", "micro-batches are always cut by tokens"),
    Absent("rollout.test_freq", "it counts publications; trainer.test_freq counts training steps"),
    Absent("algorithm.pf_ppo", "there is no PF-PPO"),
    Absent("algorithm.filter_groups.metric", "groups are compared by their episodes' rewards"),
    Absent(f"{ACTOR}.ppo_micro_batch_size", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent(f"{ACTOR}.strategy", "there is one trainer rank"),
    Absent(f"{ACTOR}.fsdp_config", "there is one trainer rank"),
    Absent(f"{ACTOR}.megatron", "there is one trainer rank"),
    Absent(f"{ACTOR}.checkpoint", "the policy is saved in Hugging Face format (trainer.save_freq)"),
    Absent("actor_rollout_ref.ref", "the reference policy is the untrained one (actor.use_kl_loss)"),
    Absent("critic.enable", "algorithm.adv_estimator says whether there is a critic"),
    Absent("critic.strategy", "there is one trainer rank"),
    Absent("critic.rollout_n", "rollout.n says how many episodes a group has"),
    Absent("critic.ppo_mini_batch_size", "actor.ppo_mini_batch_size counts for both"),
    Absent("critic.ppo_micro_batch_size", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent("critic.ppo_micro_batch_size_per_gpu", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent("critic.ppo_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu counts for all forwards"),
    Absent("critic.forward_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu counts for all forwards"),
    Absent("critic.model", "critic.path names the model"),
    Absent("critic.checkpoint", "the policy is saved in Hugging Face format (trainer.save_freq)"),
    Absent("trainer.project_name", "runs are told apart by trainer.experiment_name"),
    Absent("trainer.default_local_dir", "a run's folder is below trainer.output_dir"),
    Absent("trainer.balance_batch", "there is one trainer rank"),
    Absent("trainer.rollout_data_dir", "trajectories are recorded in the run's folder"),
    Absent("trainer.validation_data_dir", "trajectories are recorded in the run's folder"),
    Absent("async_training.concurrent_samples_per_replica", "rollout.max_concurrent counts episodes over all engines"),
    Absent("async_training.checkpoint_engine", "weights go through shared memory (weights.bucket_mb)"),
    Absent("reward_model", "the environment or the agent judges an episode (env.cls, agent.loop)"),
    Absent("custom_reward_function", "the environment or the agent judges an episode (env.cls, agent.loop)"),
    *(Fixed(f"{section}.log", (True, False), "the penalty for length is always logged") for section in BUFFERS),
    Renamed("reward.reward_kwargs.max_resp_len", ("data.max_response_length",)),
    Renamed("reward_model.reward_kwargs.max_resp_len", ("data.max_response_length",)),
    Fixed("reward_model.enable", (False,), "the environment or the agent judges an episode (env.cls, agent.loop)"),
    Absent("reward", "the environment or the agent judges an episode (env.cls, agent.loop)"),
    Absent("distillation", "there is no distillation"),
    Absent("transfer_queue", "trajectories go from the rollout worker to the trainer directly"),
    Absent("global_profiler", "there is no profiler"),
    Absent("ray_kwargs", "agentrl starts its processes without Ray"),
    Absent("ray_init", "agentrl starts its processes without Ray"),
    Absent("hydra", "files are composed by `extends:`"),
    Absent("defaults", "files are composed by `extends:`"),
)
"""Names without a row are unknown here."""
