"""Configurations in verl's or AReaL's key names, as files, below files and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import dump_yaml, load_config
from tests.support.configs import TASKS, refused, translations

VERL_FILE = """\
data:
  train_files: [train.parquet]
  val_files: test.parquet
  train_batch_size: 64
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  hybrid_engine: false
  model: {path: models/mine, use_remove_padding: true}
  rollout:
    name: torch
    mode: async
    n: 4
    temperature: 0.9
    top_p: 1.0
    top_k: -1
    calculate_log_probs: true
    val_kwargs: {do_sample: true, temperature: 0.6, top_p: 0.7, n: 2}
  actor:
    ppo_mini_batch_size: 16
    ppo_epochs: 1
    use_kl_loss: false
    entropy_coeff: 0
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    loss_agg_mode: token-mean
    grad_clip: 1.0
    optim: {lr: 1e-6, weight_decay: 0.1, lr_warmup_steps: 10}
algorithm:
  adv_estimator: grpo
  use_kl_in_reward: false
  rollout_correction: {bypass_mode: true}
trainer:
  total_training_steps: 100
  n_gpus_per_node: 1
  nnodes: 1
  save_freq: -1
  test_freq: 10
  logger: [console, tensorboard]
  experiment_name: mine
async_training: {staleness_threshold: 0.5, trigger_parameter_sync_step: 2, partial_rollout: true}
"""

VERL_NATIVE = """\
model: {path: models/mine}
data: {train: train.parquet, val: test.parquet, max_prompt_length: 512, max_response_length: 1024}
rollout: {engine: torch, n: 4, temperature: 0.9, top_p: 1.0, top_k: -1}
val: {temperature: 0.6, top_p: 0.7, n: 2}
actor:
  proximal: bypass
  ppo_mini_batch_size: 16
  clip_ratio_low: 0.2
  clip_ratio_high: 0.28
  clip_ratio_c: 10.0
  loss_agg_mode: token-mean
  grad_clip: 1.0
  optim: {lr: 1e-6, weight_decay: 0.1, lr_warmup_steps: 10}
algorithm: {adv_estimator: grpo}
trainer: {total_steps: 100, save_freq: 0, test_freq: 10, logger: [tensorboard], experiment_name: mine}
async_training: {require_batches: 4, staleness_threshold: 0.5, trigger_parameter_sync_step: 2, partial_rollout: true}
"""

AREAL_FILE = """\
experiment_name: gsm8k-grpo
seed: 1
total_train_epochs: 10
async_training: true
cluster: {n_nodes: 1, fileroot: experiments}
rollout:
  max_concurrent_rollouts: 64
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, max_tokens: 2048, greedy: false, temperature: 1.0}
actor:
  path: Qwen/Qwen2.5-1.5B-Instruct
  dtype: bfloat16
  disable_dropout: true
  group_size: ${gconfig.n_samples}
  temperature: ${gconfig.temperature}
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    {type: adam, lr: 1.70e-5, weight_decay: 0.017, beta1: 0.9, beta2: 0.999, eps: 1e-8, lr_scheduler_type: constant,
     gradient_clipping: 1.0}
  eps_clip: 0.4
  kl_ctl: 0.0
  ppo_n_minibatches: 4
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
train_dataset: {batch_size: 256, shuffle: true, path: train.jsonl, type: rl, max_length: 1024}
valid_dataset: {path: test.jsonl, type: rl}
evaluator: {freq_epochs: null, freq_steps: 5}
"""

AREAL_NATIVE = """\
model: {path: Qwen/Qwen2.5-1.5B-Instruct, dtype: bfloat16}
data: {train: train.jsonl, val: test.jsonl, shuffle: true, seed: 1, max_prompt_length: 1024, max_response_length: 1024}
rollout: {n: 4, temperature: 1.0, max_model_len: 2048, max_concurrent: 256, max_head_offpolicyness: 2}
actor:
  proximal: recompute
  clip_ratio_low: 0.4
  clip_ratio_high: 0.4
  ppo_mini_batch_size: 64
  ppo_max_token_len_per_gpu: 10240
  grad_clip: 1.0
  optim: {lr: 1.7e-5, weight_decay: 0.017, betas: [0.9, 0.999], lr_scheduler_type: constant}
algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: [1e-9, 5.0]}}
async_training: {require_batches: 4}
trainer: {experiment_name: gsm8k-grpo, output_dir: experiments, total_epochs: 10, test_freq: 5}
"""


class TestFiles:
    @pytest.mark.parametrize(
        ("foreign", "native"), [(VERL_FILE, VERL_NATIVE), (AREAL_FILE, AREAL_NATIVE)], ids=["verl", "AReaL"]
    )
    def test_a_file_in_their_style_is_the_same_as_one_in_ours(self, foreign: str, native: str, tmp_path: Path) -> None:
        (tmp_path / "foreign.yaml").write_text(foreign)
        (tmp_path / "native.yaml").write_text(native)
        config = load_config(tmp_path / "foreign.yaml")
        assert config == load_config(tmp_path / "native.yaml")
        assert translations(config) and not translations(load_config(tmp_path / "native.yaml"))
        (tmp_path / "dumped.yaml").write_text(dump_yaml(config))
        again = load_config(tmp_path / "dumped.yaml")
        assert again == config and not translations(again)

    def test_a_file_may_extend_one_in_their_style_and_the_other_way_round(self, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("gconfig: {n_samples: 4}\ndata: {train: t.jsonl}\n")
        (tmp_path / "native.yaml").write_text("extends: base.yaml\nrollout: {n: 6}\n")
        config = load_config(tmp_path / "native.yaml")
        assert config.rollout.n == 6
        assert not translations(config), "what does not count in the end is not said"
        (tmp_path / "foreign.yaml").write_text("extends: native.yaml\ngconfig: {n_samples: 2}\n")
        assert load_config(tmp_path / "foreign.yaml").rollout.n == 2
        assert load_config(tmp_path / "foreign.yaml", ["actor_rollout_ref.rollout.n=8"]).rollout.n == 8

    def test_problems_name_the_line_of_the_foreign_key(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("data: {train: t.jsonl}\ngconfig:\n  n_samples: many\n")
        problem = refused(path)
        assert problem.key == "rollout.n"
        assert problem.origin.endswith("run.yaml, line 3, as gconfig.n_samples")


class TestOverrides:
    def test_names_of_theirs_are_taken_on_the_command_line(self) -> None:
        config = load_config(TASKS, ["actor_rollout_ref.actor.optim.lr=1e-4", "+gconfig.n_samples=4"])
        assert (config.actor.optim.lr, config.rollout.n) == (1e-4, 4)
        assert translations(config) == [
            "translated: actor_rollout_ref.actor.optim.lr -> actor.optim.lr: 0.0001",
            "translated: gconfig.n_samples -> rollout.n: 4",
        ]

    def test_part_of_a_group_can_be_changed(self) -> None:
        batch = {"data": {"train": "t.jsonl", "train_batch_size": 64}, "actor": {"ppo_mini_batch_size": 16}}
        assert load_config(batch).async_training.require_batches == 4
        config = load_config(batch, ["actor_rollout_ref.actor.ppo_mini_batch_size=32"])
        assert (config.actor.ppo_mini_batch_size, config.async_training.require_batches) == (32, 2)
        config = load_config(batch, ["async_training.require_batches=3"])
        assert config.groups_per_step == 48, "the last word on a key counts"
        clip = {**TASKS, "actor": {"eps_clip": 0.2, "eps_clip_higher": 0.28}}
        config = load_config(clip, ["actor.eps_clip=0.3"])
        assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.3, 0.28)

    def test_a_limit_in_groups_follows_the_size_of_a_group(self) -> None:
        source = {**TASKS, "rollout": {"max_concurrent_rollouts": 8}, "gconfig": {"n_samples": 4}}
        assert load_config(source).rollout.max_concurrent == 32
        assert load_config(source, ["rollout.n=8"]).rollout.max_concurrent == 64
        assert load_config(source, ["rollout.max_concurrent=100"]).rollout.max_concurrent == 100
