"""What other trainers call a setting: TRL's GRPOConfig, verl, prime-rl, OpenRLHF, vLLM and the optimizers' own arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherName:
    """`name` of `trainer` is `here`; where that is None, `why` says what to do instead, as "is not needed: ..."."""

    name: str
    trainer: str
    here: str | None
    why: str = ""


_TRL = {
    "model_name_or_path": "model.path",
    "max_prompt_length": "data.train.max_prompt_tokens",
    "dataset_name": "data.train.name",
    "dataset_config": "data.train.subset",
    "dataset_train_split": "data.train.split",
    "shuffle_dataset": "data.shuffle",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_completion_tokens",
    "temperature": "rollout.temperature",
    "mask_truncated_completions": "rollout.overlong",
    "max_tool_calling_iterations": "rollout.max_turns",
    "tools": "tools",
    "environment_factory": "environments.NAME.factory",
    "rollout_func": "rollout_function.function",
    "reward_funcs": "rewards",
    "reward_weights": "rewards[].weight",
    "multi_objective_aggregation": "advantage.rewards",
    "scale_rewards": "advantage.type",
    "loss_type": "loss.type",
    "beta": "loss.beta",
    "epsilon": "loss.epsilon",
    "epsilon_high": "loss.epsilon_high",
    "delta": "loss.delta",
    "top_entropy_quantile": "loss.top_entropy_quantile",
    "entropy_coef": "loss.entropy_bonus",
    "importance_sampling_level": "loss.type",
    "vllm_importance_sampling_correction": "loss.correction",
    "vllm_importance_sampling_mode": "loss.correction.level",
    "vllm_importance_sampling_cap": "loss.correction.cap",
    "off_policy_mask_threshold": "loss.off_policy_mask",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "optim": "optimizer.type",
    "max_steps": "training.max_steps",
    "bf16": "model.compute_dtype",
    "gradient_checkpointing": "model.activation_checkpointing",
    "torch_compile": "training.compile",
    "use_peft": "model.lora",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "load_in_4bit": "model.lora.quantization",
    "chat_template_path": "model.chat_template",
    "chat_template_kwargs": "model.chat_template_arguments",
    "attn_implementation": "model.attention",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "seed": "run.seed",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "metric_for_best_model": "checkpoint.best_metric",
    "eval_steps": "evaluation.every_steps",
    "report_to": "tracking",
    "vllm_server_host": "inference.urls",
    "vllm_server_base_url": "inference.urls",
    "vllm_server_timeout": "inference.startup_timeout_s",
    "vllm_gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference.vllm.tensor_parallel_size",
    "vllm_max_model_length": "inference.max_model_len",
    "vllm_enable_sleep_mode": "inference.vllm.sleep_while_training",
    "max_staleness": "rollout.max_staleness",
    "weight_sync_steps": "training.weight_sync_steps",
    "max_inflight_tasks": "rollout.max_in_flight",
}
_VERL = {
    "actor_rollout_ref.model.path": "model.path",
    "data.train_files": "data.train.path",
    "data.val_files": "evaluation.data.path",
    "data.train_batch_size": "rollout.groups_per_step",
    "data.max_prompt_length": "data.train.max_prompt_tokens",
    "data.max_response_length": "rollout.max_completion_tokens",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "inference.vllm.tensor_parallel_size",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "training.micro_batch_tokens",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.epsilon_high",
    "actor_rollout_ref.actor.kl_loss_coef": "loss.beta",
    "actor_rollout_ref.actor.entropy_coeff": "loss.entropy_bonus",
    "actor_rollout_ref.actor.loss_agg_mode": "loss.type",
    "algorithm.adv_estimator": "advantage.type",
    "custom_reward_function.path": "rewards[].function",
    "trainer.total_training_steps": "training.max_steps",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.test_freq": "evaluation.every_steps",
    "trainer.n_gpus_per_node": "launch.num_trainer_ranks",
    "trainer.nnodes": "launch.nodes",
    "trainer.logger": "tracking",
}
_PRIME_RL = {
    "orchestrator.rollouts_per_example": "rollout.group_size",
    "orchestrator.sampling.max_tokens": "rollout.max_completion_tokens",
    "orchestrator.max_off_policy_steps": "rollout.max_staleness",
    "max_async_level": "rollout.max_staleness",
    "orchestrator.env": "rollout.agent.environment",
    "trainer.model.name": "model.path",
    "trainer.optim.lr": "optimizer.lr",
    "trainer.model.seq_len": "training.micro_batch_tokens",
    "inference.parallel.tp": "inference.vllm.tensor_parallel_size",
    "ckpt.interval": "checkpoint.every_steps",
}
_OPENRLHF = {
    "pretrain": "model.path",
    "prompt_data": "data.train.path",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout_batch_size": "rollout.groups_per_step",
    "generate_max_len": "rollout.max_completion_tokens",
    "prompt_max_len": "data.train.max_prompt_tokens",
    "actor_learning_rate": "optimizer.lr",
    "init_kl_coef": "loss.beta",
    "eps_clip": "loss.epsilon",
    "advantage_estimator": "advantage.type",
    "remote_rm_url": "rewards[].function",
    "vllm_num_engines": "inference.replicas",
    "save_path": "run.dir",
}
_WITHOUT = {
    "gradient_accumulation_steps": "is not needed: rollout.groups_per_step is the size of a step, and training.micro_batch_tokens "
    "divides it",
    "per_device_train_batch_size": "is not needed: rollout.groups_per_step x rollout.group_size is the batch, and "
    "training.micro_batch_tokens divides it",
    "generation_batch_size": "is not needed: rollout.groups_per_step x rollout.group_size is the batch of a step",
    "steps_per_generation": "is not needed: generation runs beside training; training.minibatches makes several updates of a "
    "step's samples",
    "logging_steps": "is not needed: every step is logged to metrics.jsonl",
    "log_completions": "is not needed: every rollout is recorded; grpo-async inspect-rollouts shows them",
    "num_iterations": "is not supported: a sample is trained once; training.minibatches makes several updates of a step's samples",
    "num_train_epochs": "is not supported: training.max_steps is the length of a run",
    "use_vllm": "is not needed: inference.engine is vllm or embedded, and one of them always generates",
    "vllm_mode": "is not needed: servers are processes of their own; inference.vllm.sleep_while_training shares their GPUs",
    "sync_ref_model": "is not supported: loss.reference stays as it was at the start",
    "use_liger_kernel": "is not needed: logits are computed for training.logprob_chunk_tokens tokens at a time",
    "use_bias_correction_kl": "is not supported: the KL is not weighed by the ratio",
    "fsdp": "is not needed: the trainer always shards with FSDP2; launch.sharding says how",
    "deepspeed": "is not supported: the trainer shards with FSDP2",
    "remove_unused_columns": "is not needed: every column is handed to the reward functions; data.train.drop leaves some out",
    **dict.fromkeys(
        ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
        "is not supported: completions are sampled from the policy as it is; rollout.temperature can be set",
    ),
}

OTHER_NAMES = (
    *(OtherName(name, "TRL", here) for name, here in _TRL.items()),
    *(OtherName(name, "verl", here) for name, here in _VERL.items()),
    *(OtherName(name, "prime-rl", here) for name, here in _PRIME_RL.items()),
    *(OtherName(name, "OpenRLHF", here) for name, here in _OPENRLHF.items()),
    *(OtherName(name, "TRL", None, why) for name, why in _WITHOUT.items()),
)
