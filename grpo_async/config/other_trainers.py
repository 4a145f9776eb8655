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
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "repetition_penalty": "rollout.repetition_penalty",
    "stop": "rollout.stop",
    "vllm_structured_outputs_regex": "rollout.structured_outputs.regex",
    "vllm_guided_decoding_regex": "rollout.structured_outputs.regex",
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
    "num_train_epochs": "training.epochs",
    "num_iterations": "training.num_iterations",
    "use_bias_correction_kl": "loss.use_bias_correction_kl",
    "sync_ref_model": "loss.sync_ref_model",
    "ref_model_mixup_alpha": "loss.ref_model_mixup_alpha",
    "ref_model_sync_steps": "loss.ref_model_sync_steps",
    "sapo_temperature_pos": "loss.temperature_positive",
    "sapo_temperature_neg": "loss.temperature_negative",
    "vllm_importance_sampling_clip_max": "loss.correction.cap",
    "vllm_importance_sampling_clip_min": "loss.correction.floor",
    "lr_scheduler_kwargs": "optimizer.schedule_kwargs",
    "router_aux_loss_coef": "model.router_aux_loss",
    "trust_remote_code": "model.trust_remote_code",
    "model_revision": "model.revision",
    "lora_dropout": "model.lora.dropout",
    "lora_modules_to_save": "model.lora.modules_to_save",
    "activation_checkpointing": "model.activation_checkpointing",
    "fsdp_config": "launch.sharding",
    "use_cpu": "launch.device",
    "ddp_timeout": "training.collective_timeout_s",
    "data_seed": "run.seed",
    "num_generations_eval": "evaluation.samples_per_prompt",
    "eval_strategy": "evaluation.every_steps",
    "eval_on_start": "evaluation.at_start",
    "save_strategy": "checkpoint.every_steps",
    "load_best_model_at_end": "checkpoint.keep_best",
    "vllm_server_port": "inference.urls",
    "project": "tracking[].project",
    "trackio_space_id": "tracking[].space_id",
    "bf16": "model.compute_dtype",
    "fp16": "model.compute_dtype",
    "cast_lm_head_to_fp32": "model.head_dtype",
    "gradient_checkpointing": "model.activation_checkpointing",
    "torch_compile": "training.compile",
    "use_peft": "model.lora",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "load_in_4bit": "model.lora.quantization",
    "chat_template_path": "model.chat_template",
    "chat_template_kwargs": "model.chat_template_kwargs",
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
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "evaluation.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "evaluation.top_k",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluation.temperature",
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
    "trainer.nnodes": "launch.nodes.train",
    "trainer.logger": "tracking",
}
_PRIME_RL = {
    "orchestrator.rollouts_per_example": "rollout.group_size",
    "orchestrator.sampling.max_tokens": "rollout.max_completion_tokens",
    "orchestrator.train.sampling.top_p": "rollout.top_p",
    "orchestrator.train.sampling.top_k": "rollout.top_k",
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
    "steps_per_generation": "is not needed: generation runs during training; training.minibatches makes several updates of a "
    "step's samples, training.num_iterations several passes over them",
    "logging_steps": "is not needed: every step is logged to metrics.jsonl",
    "log_completions": "is not needed: every rollout is recorded; grpo-async inspect-rollouts shows them",
    "use_vllm": "is not needed: inference.engine is vllm or embedded, and one of them always generates",
    "vllm_mode": "is not needed: servers are processes of their own; inference.vllm.sleep_while_training shares their GPUs",
    "use_liger_kernel": "is not needed: logits are computed for training.logprob_chunk_tokens tokens at a time",
    "generation_kwargs": "is not needed: what it holds are settings of their own, such as rollout.top_p and rollout.stop",
    "fsdp": "is not needed: the trainer always shards with FSDP2; launch.sharding says how",
    "deepspeed": "is not supported: the trainer shards with FSDP2",
    "remove_unused_columns": "is not needed: every column is handed to the reward functions; data.train.remove_columns "
    "leaves some out",
}
_REST_OF_TRL = {
    # of the model
    "model_init_kwargs": "is not needed: what it holds are keys of the section model, such as model.dtype and model.revision",
    "disable_dropout": "is not needed: a policy has no dropout but model.lora.dropout, and that in its update alone",
    "neftune_noise_alpha": "is not supported: servers have no noise in their embeddings",
    "use_cache": "is not needed: the trainer has no cache of keys and values, servers always have one",
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        "is not needed: model.activation_checkpointing says what is recomputed",
    ),
    "liger_kernel_config": "is not needed: logits are computed for training.logprob_chunk_tokens tokens at a time",
    "tf32": "is not supported: of float32 products all bits are computed; model.compute_dtype: bfloat16 is faster still",
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), "is not needed: servers generate for evaluations, in inference.dtype"
    ),
    **dict.fromkeys(
        ("torch_compile_backend", "torch_compile_mode"), "is not supported: training.compile has torch's defaults"
    ),
    # of the loss
    **dict.fromkeys(
        ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        "is not supported: loss.entropy_bonus stays what it is; a loss of your own (loss.function) may change",
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "is not supported: there is no loss vespo; loss.function takes one of your own",
    ),
    "label_smoothing_factor": "is not supported: it belongs to supervised training",
    "average_tokens_across_devices": "is not needed: the loss always divides by the tokens of all ranks",
    # of the optimizer
    "optim_args": "is not needed: what it holds are keys of the section optimizer, such as optimizer.betas",
    "optim_target_modules": "is not supported: optimizer.type: muon takes the matrices of all layers",
    # of data and batches
    **dict.fromkeys(
        ("auto_find_batch_size", "per_device_eval_batch_size", "eval_accumulation_steps", "pad_to_multiple_of"),
        "is not needed: samples are packed into micro-batches of training.micro_batch_tokens, and servers batch by themselves",
    ),
    **dict.fromkeys(
        (
            *(
                "dataloader_num_workers",
                "dataloader_pin_memory",
                "dataloader_persistent_workers",
                "dataloader_prefetch_factor",
            ),
            *("dataloader_multiprocessing_context", "dataloader_in_order"),
        ),
        "is not needed: prompts are in memory, and rank 0 hands the samples of a step out",
    ),
    "dataloader_drop_last": "is not needed: the last step of training.epochs takes what is left",
    "train_sampling_strategy": "is not needed: data.shuffle says whether rows are shuffled, and lengths are balanced over ranks",
    "length_column_name": "is not needed: lengths are known once completions are sampled",
    "label_names": "is not supported: it belongs to supervised training",
    "ignore_data_skip": "is not needed: a resume continues at its place in the data right away",
    # of generation
    **dict.fromkeys(
        ("cache_implementation", "use_transformers_continuous_batching", "use_transformers_paged"),
        "is not needed: inference.engine: embedded batches continuously with transformers' models",
    ),
    "transformers_continuous_batching_config": "is not needed: inference.embedded.max_slots says how many sequences are generated "
    "at once",
    "vllm_model_impl": "is not needed: inference.vllm.extra_args takes --model-impl",
    "vllm_group_port": "is not needed: a free port is taken",
    "ds3_gather_for_generation": "is not needed: weights are gathered and sent bucket by bucket (weights.bucket_mb)",
    # of evaluation and checkpoints
    "eval_delay": "is not supported: evaluation.every_steps begins with the run",
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "include_for_metrics",
            "batch_eval_metrics",
        ),
        "is not needed: an evaluation generates and scores completions, and all of them are recorded",
    ),
    "greater_is_better": "is not needed: of every metric that checkpoint.best_metric takes more is better",
    "save_only_model": "is not supported: a checkpoint has what a resume needs; the model alone is exported at the end",
    "save_on_each_node": "is not needed: all machines write one checkpoint into run.dir, which they share",
    "enable_jit_checkpoint": "is not needed: SIGTERM always saves, within launch.stop_timeout_s",
    "resume_from_checkpoint": "is not needed: it is an option of the command, train --resume",
    "restore_callback_states_from_checkpoint": "is not needed: there are no callbacks, and a resume restores everything",
    # of logs
    **dict.fromkeys(
        ("logging_strategy", "logging_first_step", "logging_nan_inf_filter"),
        "is not needed: every step is logged to metrics.jsonl as it is",
    ),
    **dict.fromkeys(
        ("log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"),
        "is not needed: every rollout is recorded; grpo-async inspect-rollouts shows and exports them",
    ),
    **dict.fromkeys(
        ("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm"),
        "is not needed: every process has a log of its own below the run's directory",
    ),
    "include_num_input_tokens_seen": "is not needed: the tokens of the ledger are logged at every step",
    **dict.fromkeys(
        ("trackio_bucket_id", "trackio_static_space_id"),
        "is not supported: of trackio tracking has project and space_id",
    ),
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
            "hub_revision",
        ),
        "is not supported: the run writes a folder with model, tokenizer and card, which `hf upload` takes",
    ),
    "skip_memory_metrics": "is not needed: the most memory that was held is logged at every step",
    "debug": "is not supported: the log of the trainer has the stacks of a run that stands still",
    # of processes
    "full_determinism": "is not needed: with rollout.max_staleness: 0 a run on the CPU repeats to the last bit",
    "local_rank": "is not needed: torchrun, which the launcher starts, says which rank a process is",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "is not needed: the command says what is done"),
    **dict.fromkeys(
        (
            *("accelerator_config", "parallelism_config", "ddp_backend", "ddp_static_graph", "ddp_broadcast_buffers"),
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
        ),
        "is not needed: the trainer shards with FSDP2, without accelerate and DDP; launch.sharding says how",
    ),
    "torch_empty_cache_steps": "is not needed: the allocator's cache is given back where servers take the memory "
    "(inference.vllm.sleep_while_training)",
}
"""The rest of TRL's GRPOConfig, the fields of transformers' TrainingArguments among them."""

OTHER_NAMES = (
    *(OtherName(name, "TRL", here) for name, here in _TRL.items()),
    *(OtherName(name, "verl", here) for name, here in _VERL.items()),
    *(OtherName(name, "prime-rl", here) for name, here in _PRIME_RL.items()),
    *(OtherName(name, "OpenRLHF", here) for name, here in _OPENRLHF.items()),
    *(OtherName(name, "TRL", None, why) for name, why in (_WITHOUT | _REST_OF_TRL).items()),
)
