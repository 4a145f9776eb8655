"""What other trainers call a setting: TRL's GRPOConfig, verl, prime-rl, OpenRLHF. Only names that people type in a first config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherName:
    """`name` of `trainer` is `here`; where that is None, `why` says what to do instead, as "is not needed: ..."."""

    name: str
    trainer: str
    here: str | None
    why: str = ""


_NAMES = {
    "TRL": {
        "model_name_or_path": "model.path",
        "attn_implementation": "model.attention",
        "bf16": "model.compute_dtype",
        "fp16": "model.compute_dtype",
        "cast_lm_head_to_fp32": "model.head_dtype",
        "gradient_checkpointing": "model.activation_checkpointing",
        "use_peft": "model.lora",
        "peft_config": "model.lora",
        "lora_r": "model.lora.rank",
        "lora_alpha": "model.lora.alpha",
        "output_dir": "run.dir",
        "report_to": "tracking",
        "dataset_name": "data.train.name",
        "shuffle_dataset": "data.shuffle",
        "max_prompt_length": "data.train.max_prompt_tokens",
        "num_generations": "rollout.group_size",
        "max_completion_length": "rollout.max_completion_tokens",
        "mask_truncated_completions": "rollout.overlong",
        "max_tool_calling_iterations": "rollout.max_turns",
        "vllm_structured_outputs_regex": "rollout.structured_outputs.regex",
        "environment_factory": "environments.NAME.factory",
        "rollout_func": "rollout_function.function",
        "reward_funcs": "rewards",
        "reward_weights": "rewards[].weight",
        "scale_rewards": "advantage.type",
        "loss_type": "loss.type",
        "importance_sampling_level": "loss.type",
        "vllm_importance_sampling_correction": "loss.correction",
        "vllm_importance_sampling_mode": "loss.correction",
        "vllm_importance_sampling_clip_max": "loss.correction.cap",
        "off_policy_mask_threshold": "loss.off_policy_mask",
        "entropy_coef": "loss.entropy_bonus",
        "learning_rate": "optimizer.lr",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "adam_epsilon": "optimizer.eps",
        "lr_scheduler_type": "optimizer.schedule",
        "lr_scheduler_kwargs": "optimizer.schedule_kwargs",
        "optim": "optimizer.type",
        "num_train_epochs": "training.epochs",
        "eval_steps": "evaluation.every_steps",
        "eval_on_start": "evaluation.at_start",
        "num_generations_eval": "evaluation.samples_per_prompt",
        "save_steps": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep_last",
        "metric_for_best_model": "checkpoint.best_metric",
        "load_best_model_at_end": "checkpoint.keep_best",
        "vllm_server_base_url": "inference.urls",
        "vllm_server_host": "inference.urls",
        "vllm_gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
        "vllm_tensor_parallel_size": "inference.vllm.tensor_parallel_size",
        "vllm_max_model_length": "inference.max_model_len",
        "dtype": "model.dtype",
        "max_inflight_tasks": "rollout.max_in_flight",
        "token_budget": "training.micro_batch_tokens",
        "sapo_temperature_neg": "loss.temperature_negative",
        "sapo_temperature_pos": "loss.temperature_positive",
        "vllm_importance_sampling_clip_min": "loss.correction.floor",
        "vllm_importance_sampling_cap": "loss.correction.cap",
        "multi_objective_aggregation": "advantage.rewards",
        "vllm_server_port": "inference.urls",
        "vllm_server_timeout": "inference.startup_timeout_s",
        "request_timeout": "inference.request_timeout_s",
        "weight_sync_timeout": "weights.timeout_s",
        "heartbeat_stale_after_s": "inference.heartbeat_timeout_s",
        "vllm_enable_sleep_mode": "inference.vllm.sleep_while_training",
        "vllm_model_impl": "inference.vllm.extra_args",
        "disable_dropout": "model.lora.dropout",
    },
    "verl": {
        "data.train_files": "data.train.path",
        "data.train_batch_size": "rollout.groups_per_step",
        "data.max_prompt_length": "data.train.max_prompt_tokens",
        "data.max_response_length": "rollout.max_completion_tokens",
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "inference.vllm.tensor_parallel_size",
        "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
        "actor_rollout_ref.actor.clip_ratio_low": "loss.epsilon",
        "actor_rollout_ref.actor.clip_ratio_high": "loss.epsilon_high",
        "actor_rollout_ref.actor.kl_loss_coef": "loss.beta",
        "actor_rollout_ref.actor.loss_agg_mode": "loss.type",
        "algorithm.adv_estimator": "advantage.type",
        "custom_reward_function.path": "rewards[].function",
        "trainer.total_training_steps": "training.max_steps",
        "trainer.save_freq": "checkpoint.every_steps",
        "trainer.n_gpus_per_node": "launch.num_trainer_ranks",
        "trainer.nnodes": "launch.trainer_nodes",
        "trainer.logger": "tracking",
    },
    "prime-rl": {
        "orchestrator.rollouts_per_example": "rollout.group_size",
        "orchestrator.sampling.max_tokens": "rollout.max_completion_tokens",
        "orchestrator.max_off_policy_steps": "rollout.max_staleness",
        "max_async_level": "rollout.max_staleness",
        "trainer.model.seq_len": "training.micro_batch_tokens",
        "ckpt.interval": "checkpoint.every_steps",
    },
    "OpenRLHF": {
        "pretrain": "model.path",
        "prompt_data": "data.train.path",
        "n_samples_per_prompt": "rollout.group_size",
        "rollout_batch_size": "rollout.groups_per_step",
        "generate_max_len": "rollout.max_completion_tokens",
        "init_kl_coef": "loss.beta",
        "eps_clip": "loss.epsilon",
        "vllm_num_engines": "inference.replicas",
    },
}
_BATCH = "is not needed: rollout.groups_per_step x rollout.group_size is the batch, and training.micro_batch_tokens divides it"
_SHARDED = "is not needed: the trainer always shards with FSDP2; launch.sharding says how"
_RECORDED = "is not needed: every step is in metrics.jsonl and every rollout is recorded"
_UPLOAD = "is not needed: `grpo-async export-model --push-to-hub` uploads a model"
_WITHOUT = {
    "gradient_accumulation_steps": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "generation_batch_size": _BATCH,
    "steps_per_generation": "is not needed: generation runs during training; training.minibatches makes several updates of a step",
    "logging_steps": _RECORDED,
    "log_completions": _RECORDED,
    "use_vllm": "is not needed: inference.engine is vllm or embedded, and one of them always generates",
    "vllm_mode": "is not needed: servers are processes of their own; launch.colocate: true puts them on the trainer's GPUs",
    "use_liger_kernel": "is not needed: logits are computed for a few tokens at a time",
    "generation_kwargs": "is not needed: what it holds are settings of their own, such as rollout.top_p and rollout.stop",
    "model_init_kwargs": "is not needed: what it holds are settings of their own, such as model.revision and model.attention",
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "resume_from_checkpoint": "is not needed: it is an option of the command, train --resume",
    "top_entropy_quantile": "is not supported: every token is trained; loss.type: custom can leave some out by their entropy",
    "push_to_hub": _UPLOAD,
    "hub_model_id": _UPLOAD,
}

OTHER_NAMES = (
    *(OtherName(name, trainer, here) for trainer, names in _NAMES.items() for name, here in names.items()),
    *(OtherName(name, "TRL", None, why) for name, why in _WITHOUT.items()),
)
