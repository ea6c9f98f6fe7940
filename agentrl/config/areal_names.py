"""AReaL's key names (1.0, and what older versions called differently) and what they are here.

What several keys say together is in `foreign_groups.py`: the proximal policy, the clip range, the behaviour weight,
the sizes of batches.
"""

from __future__ import annotations

from typing import Any

from agentrl.config.foreign import NOT_GIVEN, Absent, Fixed, Renamed, Row, flag

_ALL_TOKENS = 10**8
"""AReaL's default of `top_k`."""


def all_if_huge(value: Any) -> Any:
    """Of `top_k`: AReaL's default of 1e8 is all tokens."""
    return -1 if isinstance(value, int | float) and value >= _ALL_TOKENS else value


def greedy_if(value: Any) -> Any:
    """Of `greedy`: true is temperature 0; false leaves the temperature as it is."""
    return 0.0 if flag(value) else NOT_GIVEN


def dual_clip(value: Any) -> Any:
    """Of `c_clip`.

    Raises:
        ValueError: null, which switches dual clipping off.
    """
    if value is None:
        raise ValueError(
            "null switches dual clipping off, and here it is always on: write a bound, such as 1000, "
            "that is never reached"
        )
    return value


def off_if_token(value: Any) -> Any:
    """Of `gae_timestep_unit`: AReaL's default is the default here."""
    return NOT_GIVEN if value == "token" else value


AREAL: tuple[Row, ...] = (
    # model and data
    Renamed("actor.path", ("model.path",)),
    Renamed("actor.dtype", ("model.dtype",)),
    Renamed("seed", ("data.seed",)),
    Renamed("train_dataset.path", ("data.train",)),
    Renamed("train_dataset.dataset_kwargs", ("data.train_args",)),
    Renamed("train_dataset.split", ("data.train_args.split",)),
    Renamed("train_dataset.shuffle", ("data.shuffle",)),
    Renamed("train_dataset.max_length", ("data.max_prompt_length",)),
    Renamed("valid_dataset.path", ("data.val",)),
    Renamed("valid_dataset.dataset_kwargs", ("data.val_args",)),
    Renamed("valid_dataset.split", ("data.val_args.split",)),
    # rollout
    Renamed("gconfig.n_samples", ("rollout.n",)),
    Renamed("actor.group_size", ("rollout.n",)),
    Renamed("gconfig.max_new_tokens", ("data.max_response_length",)),
    Renamed("actor.max_new_tokens", ("data.max_response_length",)),
    Renamed("gconfig.max_tokens", ("rollout.max_model_len",)),
    Renamed("gconfig.temperature", ("rollout.temperature",)),
    Renamed("actor.temperature", ("rollout.temperature",)),
    Renamed("gconfig.top_p", ("rollout.top_p",)),
    Renamed("gconfig.top_k", ("rollout.top_k",), all_if_huge),
    Renamed("gconfig.stop", ("rollout.stop",)),
    Renamed("eval_gconfig.n_samples", ("val.n",)),
    Renamed("eval_gconfig.temperature", ("val.temperature",)),
    Renamed("eval_gconfig.greedy", ("val.temperature",), greedy_if),
    Renamed("eval_gconfig.top_p", ("val.top_p",)),
    Renamed("eval_gconfig.top_k", ("val.top_k",), all_if_huge),
    # update
    Renamed("actor.c_clip", ("actor.clip_ratio_c",), dual_clip, takes_null=True),
    Renamed("actor.reward_bias", ("algorithm.reward_bias",)),
    Renamed("actor.reward_scaling", ("algorithm.reward_scaling",)),
    Renamed("actor.reward_clip", ("algorithm.reward_clip",)),
    Renamed("actor.discount", ("algorithm.gamma",)),
    Renamed("actor.gae_lambda", ("algorithm.lam",)),
    Renamed("actor.gae_timestep_unit", ("algorithm.gae_timestep",), off_if_token),
    Renamed("actor.m2_threshold", ("algorithm.rollout_correction.m2_threshold",)),
    Renamed("actor.mb_spec.max_tokens_per_mb", ("actor.ppo_max_token_len_per_gpu",)),
    Renamed("actor.optimizer.lr", ("actor.optim.lr",)),
    Renamed("actor.optimizer.weight_decay", ("actor.optim.weight_decay",)),
    Renamed("actor.optimizer.lr_scheduler_type", ("actor.optim.lr_scheduler_type",)),
    Renamed("actor.optimizer.min_lr_ratio", ("actor.optim.min_lr_ratio",)),
    Renamed("actor.optimizer.warmup_steps", ("actor.optim.lr_warmup_steps",)),
    Renamed("actor.optimizer.gradient_clipping", ("actor.grad_clip",)),
    Renamed("critic.eps_clip", ("critic.cliprange_value",)),
    Renamed("critic.optimizer.lr", ("critic.optim.lr",)),
    Renamed("critic.optimizer.weight_decay", ("critic.optim.weight_decay",)),
    Renamed("critic.optimizer.lr_scheduler_type", ("critic.optim.lr_scheduler_type",)),
    Renamed("critic.optimizer.min_lr_ratio", ("critic.optim.min_lr_ratio",)),
    Renamed("critic.optimizer.warmup_steps", ("critic.optim.lr_warmup_steps",)),
    Renamed("critic.optimizer.gradient_clipping", ("critic.grad_clip",)),
    # run
    Renamed("experiment_name", ("trainer.experiment_name",)),
    Renamed("cluster.fileroot", ("trainer.output_dir",)),
    Renamed("total_train_epochs", ("trainer.total_epochs",)),
    Renamed("total_train_steps", ("trainer.total_steps",)),
    Renamed("saver.freq_steps", ("trainer.save_freq",)),
    Renamed("evaluator.freq_steps", ("trainer.test_freq",)),
    Renamed("evaluator.eval_before_train", ("trainer.val_before_train",)),
    # what agentrl always does, or never
    Fixed("train_dataset.type", ("rl",), "tasks are played"),
    Fixed("valid_dataset.type", ("rl",), "tasks are played"),
    Fixed("valid_dataset.shuffle", (False,), "held-out tasks are played in their order"),
    Fixed("gconfig.greedy", (False,), "training needs sampled episodes"),
    Fixed("gconfig.min_new_tokens", (0,), "a turn may end at once"),
    Fixed("gconfig.ignore_eos", (False,), "a turn ends at the end token"),
    Fixed("gconfig.stop_token_ids", ([], None), "a turn ends at the end token, or at a text of rollout.stop"),
    Fixed("gconfig.frequency_penalty", (0,), "recorded log-probs are those of the model's own distribution"),
    Fixed("gconfig.use_beam_search", (False,), "episodes are sampled"),
    Fixed("gconfig.drop_incomplete_group", (False,), "a failed episode leaves its group, the others are trained"),
    Fixed("rollout.queue_size", (None,), "the queue holds all that may be admitted"),
    Fixed("rollout.enable_rollout_tracing", (False,), "there is no such tracing"),
    Fixed("rollout.dump_to_file", (True,), "trajectories are recorded in the run's folder"),
    Fixed("actor.init_from_scratch", (False,), "training starts from model.path"),
    Fixed("actor.disable_dropout", (True,), "rollout and training must be the same function"),
    Fixed("actor.gradient_checkpointing", (False,), "activations are kept"),
    Fixed("actor.optimizer.type", ("adam",), "the optimiser is AdamW"),
    Fixed("actor.optimizer.eps", (1e-8,), "AdamW's epsilon is 1e-8"),
    Fixed("actor.optimizer.warmup_steps_proportion", (0,), "the warm-up is actor.optim.lr_warmup_steps long"),
    Fixed("actor.mask_no_eos_with_zero", (False,), "rollout.on_truncation says whether cut episodes are trained"),
    Fixed(
        "async_training",
        (True,),
        "generation is asynchronous (in step with training: rollout.max_head_offpolicyness 0)",
    ),
    Fixed("enable_offload", (False,), "trainer and engines do not share a device"),
    Fixed("total_train_n_seqs", (None,), "trainer.total_steps and trainer.total_epochs bound a run"),
    Fixed("cluster.n_nodes", (1,), "a run is on one machine"),
    Fixed("saver.freq_epochs", (None,), "trainer.save_freq counts training steps"),
    Fixed("saver.freq_secs", (None,), "trainer.save_freq counts training steps"),
    Fixed("evaluator.freq_epochs", (None,), "trainer.test_freq counts training steps"),
    Fixed("evaluator.freq_secs", (None,), "trainer.test_freq counts training steps"),
    Fixed("recover.mode", ("disabled", "off"), "a run starts anew"),
    # without a counterpart
    Absent("trial_name", "every run gets a folder of its own below trainer.experiment_name"),
    Absent("tokenizer_path", "the tokenizer is the model's own (model.path)"),
    Absent("allocation_mode", "rollout.n_gpus_per_node says how many engines there are"),
    Absent("cluster", "a run is on one machine; rollout.n_gpus_per_node says how many engines there are"),
    Absent("scheduler", "agentrl starts its processes itself"),
    Absent("launcher", "agentrl starts its processes itself"),
    Absent("train_dataset.pin_memory", "tasks are kept in memory"),
    Absent("train_dataset.num_workers", "tasks are kept in memory"),
    Absent("train_dataset.drop_last", "a batch may hold tasks of two epochs"),
    Absent("valid_dataset", "held-out tasks are dispatched one by one, within rollout.max_concurrent"),
    Absent("gconfig.skip_special_tokens", "agents get messages, and the trainer gets token ids"),
    Absent("gconfig.seed", "seeds of requests are derived from data.seed"),
    Absent("gconfig.reward_normalization", "algorithm.adv_estimator compares the episodes of a group"),
    Absent("eval_gconfig.max_new_tokens", "data.max_response_length counts for held-out tasks too"),
    Absent("eval_gconfig.max_tokens", "rollout.max_model_len counts for held-out tasks too"),
    Absent("rollout.backend", "rollout.engine names it, rollout.n_gpus_per_node says how many engines there are"),
    Absent("rollout.experiment_name", "trainer.experiment_name names the run"),
    Absent("rollout.trial_name", "every run gets a folder of its own below trainer.experiment_name"),
    Absent("rollout.fileroot", "trainer.output_dir is the folder of all runs"),
    Absent("rollout.tokenizer_path", "the tokenizer is the model's own (model.path)"),
    Absent("rollout.scheduling_spec", "agentrl starts its processes itself"),
    Absent("rollout.schedule_policy", "requests go to the engine with the least to do"),
    Absent("rollout.check_trajectory_format", "what an agent returns is always checked"),
    Absent("rollout.request_timeout", "rollout.episode_timeout bounds an episode"),
    Absent("rollout.agent", "the agent is agent.loop"),
    Absent("workflow", "the agent is agent.loop"),
    Absent("actor.backend", "there is one trainer rank, on trainer.device"),
    Absent("actor.experiment_name", "trainer.experiment_name names the run"),
    Absent("actor.trial_name", "every run gets a folder of its own below trainer.experiment_name"),
    Absent("actor.attn_impl", "sequences are packed, with an attention of agentrl's own"),
    Absent("actor.mb_spec", "micro-batches are cut by actor.ppo_max_token_len_per_gpu"),
    Absent("actor.fsdp", "there is one trainer rank"),
    Absent("actor.megatron", "there is one trainer rank"),
    Absent("actor.archon", "there is one trainer rank"),
    Absent("actor.scheduling_spec", "agentrl starts its processes itself"),
    Absent("actor.weight_update_mode", "weights go through shared memory (weights.bucket_mb)"),
    Absent("actor.group_reward_norm", "algorithm.adv_estimator says how episodes are compared: grpo, rloo, ..."),
    Absent("actor.log_agent_stats", "metrics of the environment are logged by themselves"),
    Absent("ref", "the reference policy is the untrained one (algorithm.use_kl_in_reward)"),
    Fixed("critic.init_from_scratch", (False,), "the critic starts from critic.path"),
    Fixed("critic.disable_dropout", (True,), "values must not depend on chance"),
    Fixed("critic.gradient_checkpointing", (False,), "activations are kept"),
    Fixed("critic.optimizer.type", ("adam",), "the optimiser is AdamW"),
    Fixed("critic.optimizer.eps", (1e-8,), "AdamW's epsilon is 1e-8"),
    Fixed("critic.optimizer.warmup_steps_proportion", (0,), "the warm-up is critic.optim.lr_warmup_steps long"),
    Absent("critic.optimizer.beta1", "critic.optim.betas holds both"),
    Absent("critic.optimizer.beta2", "critic.optim.betas holds both"),
    Absent("critic.experiment_name", "trainer.experiment_name names the run"),
    Absent("critic.trial_name", "every run gets a folder of its own below trainer.experiment_name"),
    Absent("critic.backend", "there is one trainer rank, on trainer.device"),
    Absent("critic.attn_impl", "sequences are packed, with an attention of agentrl's own"),
    Absent("critic.dtype", "model.dtype counts for both"),
    Absent("critic.mb_spec", "actor.ppo_max_token_len_per_gpu counts for all forwards"),
    Absent("critic.ppo_n_minibatches", "both are updated on actor.ppo_mini_batch_size groups at a time"),
    Absent("critic.fsdp", "there is one trainer rank"),
    Absent("critic.megatron", "there is one trainer rank"),
    Absent("critic.scheduling_spec", "agentrl starts its processes itself"),
    Absent("critic.weight_update_mode", "a critic is not published"),
    Fixed("actor.peft_type", ("lora",), "adapters are LoRA's"),
    Absent("rollout.use_lora", "model.lora_rank and model.lora_merge say what engines get"),
    Absent("teacher", "there is no distillation"),
    Absent("sglang", "rollout holds all keys of an engine"),
    Absent("vllm", "rollout holds all keys of an engine"),
    Absent("saver", "trainer.save_freq says when the policy is saved"),
    Absent("evaluator", "trainer.test_freq says when held-out tasks are played"),
    Absent("recover", "a run starts anew"),
    Absent("stats_logger", "trainer.logger says where metrics go"),
    Absent("perf_tracer", "there is no tracer"),
)
"""Names without a row are unknown here. A section without a counterpart stands for what no other row names in it."""
