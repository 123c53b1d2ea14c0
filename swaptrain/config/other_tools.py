"""What the keys of other tools are called here: Trainer, TRL, Axolotl, LLaMA-Factory."""

from __future__ import annotations

__all__ = ["OTHER_TOOLS", "elsewhere"]

_SEQUENCE = "data.sequence_length"
_MODEL = "model.hf"
_FILES = "data.chat for rows of conversations, or data.text for text"
_SCHEDULE = "optimizer.schedule.name"
_EVERY = "eval.every"
_TURNS = "data.train_on: assistant, completion or all"
_STEADY = "no key: the same command goes on where the run stopped"
_BUDGETS = "memory.host and memory.device: one process streams what does not fit"
_RANK = "lora.r"
_TARGETS = "lora.target_modules"
_REPORT = "train.report_to: tensorboard or trackio; metrics.jsonl has every step in any case"
_KERNELS = "no key: kernels change the speed alone, and here they are plain PyTorch's"
_ENCODING = "no key: rows are encoded by as many processes as there are cores"
_CODE = "no key: no code that belongs to a model or to data is run"
_HUB = "no key: export writes a directory that hf upload takes"
_ALWAYS = "no key: a start goes on with the run in run.dir, or begins one"
_RULE = "no key: optimizer.name is a class of torch.optim"
_LOSS = "no key: the loss is the model's own"
_TOKENIZER = "no key: the tokenizer's own files say it"
_PREFERENCES = "no key: training here is on one answer, not on preferences or rewards"
_PADDING = "no key: a row that is alone in its sequence is padded to data.sequence_length"
_COLUMNS = "no key: rows are read by the columns that docs/finetuning.md names"
_BASE = "model.base, int8 or nf4; else weights are those of the checkpoint"
_TEXT = "no key: rows hold text alone"
_CACHE = "data.cache"
_FREEZE = "train.freeze"

OTHER_TOOLS = {
    "gradient_accumulation_steps": "data.micro_batches",
    "per_device_train_batch_size": "data.micro_batch",
    "micro_batch_size": "data.micro_batch",
    "train_batch_size": "data.micro_batch",
    "batch_size": "data.micro_batch, and data.micro_batches of those in a step",
    "per_device_eval_batch_size": "data.micro_batch, which held-out data takes too",
    "eval_batch_size": "data.micro_batch, which held-out data takes too",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "output_dir": "run.dir",
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "optim": "optimizer.name",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "lora_r": _RANK,
    "lora_rank": _RANK,
    "lora_target": _TARGETS,
    "lora_target_modules": _TARGETS,
    "lora_target_linear": "lora.target_modules: all-linear",
    "lora_modules_to_save": "lora.modules_to_save",
    "additional_target": "lora.modules_to_save",
    "finetuning_type": "a lora section for adapters; without one all is trained",
    "adapter": "a lora section for adapters; without one all is trained",
    "peft_config": "a lora section",
    "load_in_4bit": "model.base: nf4",
    "load_in_8bit": "model.base: int8",
    "quantization_bit": "model.base: nf4 or int8",
    "cutoff_len": _SEQUENCE,
    "sequence_len": _SEQUENCE,
    "max_seq_length": _SEQUENCE,
    "max_seq_len": _SEQUENCE,
    "max_length": _SEQUENCE,
    "block_size": _SEQUENCE,
    "sample_packing": "data.packing",
    "train_on_inputs": _TURNS,
    "completion_only_loss": _TURNS,
    "assistant_only_loss": _TURNS,
    "roles_to_train": _TURNS,
    "base_model": _MODEL,
    "model_name_or_path": _MODEL,
    "tokenizer_name": "data.tokenizer",
    "resize_vocab": "model.resize_to_tokenizer",
    "resize_token_embeddings_to_32x": "model.resize_to_tokenizer, which rounds to no multiple",
    "datasets": _FILES,
    "dataset": _FILES,
    "dataset_name": _FILES,
    "train_file": _FILES,
    "template": "data.chat_template",
    "val_set_size": "data.held_out, a part such as 0.02",
    "eval_steps": _EVERY,
    "evals_per_epoch": _EVERY,
    "eval_strategy": _EVERY,
    "evaluation_strategy": _EVERY,
    "save_steps": "store.keep.every for snapshots; every step is durable without it",
    "save_strategy": "store.keep.every for snapshots; every step is durable without it",
    "save_total_limit": "store.keep.last",
    "load_best_model_at_end": "store.keep.best; export RUN --step N takes the best one",
    "logging_steps": _REPORT,
    "logging_strategy": _REPORT,
    "logging_first_step": _REPORT,
    "report_to": _REPORT,
    "use_tensorboard": _REPORT,
    "use_trackio": _REPORT,
    "wandb_project": _REPORT,
    "run_name": _REPORT,
    "plot_loss": _REPORT,
    "bf16": "model.dtype: bfloat16",
    "fp16": "model.dtype: float16",
    "torch_dtype": "model.dtype",
    "gradient_checkpointing": "train.recompute; null chooses what is quicker",
    "dataloader_num_workers": "data.workers",
    "resume_from_checkpoint": _STEADY,
    "auto_resume_from_checkpoints": _STEADY,
    "deepspeed": _BUDGETS,
    "fsdp": _BUDGETS,
    "device_map": _BUDGETS,
    "special_tokens": "no key: the tokenizer's own files name them",
    "tokens": "no key: the tokenizer's own files name them; model.resize_to_tokenizer grows tables",
    "gradient_checkpointing_kwargs": "train.recompute; null chooses what is quicker",
    "activation_offloading": "no key: activations go to memory, then to the disk, by themselves",
    "layer_offloading": _BUDGETS,
    **dict.fromkeys(("max_memory", "gpu_memory_limit", "low_cpu_mem_usage"), _BUDGETS),
    **dict.fromkeys(("local_rank", "tensor_parallel_size", "context_parallel_size"), _BUDGETS),
    **dict.fromkeys(("dp_shard_size", "dp_replicate_size", "dist_config", "use_ray"), _BUDGETS),
    **dict.fromkeys(("attn_implementation", "flash_attn", "flash_attention"), _KERNELS),
    **dict.fromkeys(("xformers_attention", "sdp_attention", "flex_attention"), _KERNELS),
    **dict.fromkeys(("use_liger_kernel", "enable_liger_kernel", "use_kernels"), _KERNELS),
    **dict.fromkeys(("torch_compile", "tf32", "use_unsloth", "cut_cross_entropy"), _KERNELS),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), _KERNELS),
    **dict.fromkeys(("kernel_config", "use_v1_kernels", "chunked_cross_entropy"), _KERNELS),
    **dict.fromkeys(("preprocessing_num_workers", "dataset_num_proc"), _ENCODING),
    **dict.fromkeys(("dataset_processes", "batching_workers"), _ENCODING),
    **dict.fromkeys(("dataset_prepared_path", "tokenized_path", "overwrite_cache"), _CACHE),
    **dict.fromkeys(("trust_remote_code", "plugins"), _CODE),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "save_safetensors"), _HUB),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _ALWAYS),
    "overwrite_output_dir": "no key: --fresh starts a run over",
    "save_only_model": "no key: export writes weights alone, or with --state all of it",
    "save_first_step": "store.keep.every for snapshots; every step is durable without it",
    "saves_per_epoch": "store.keep.every for snapshots; every step is durable without it",
    "loss_watchdog_threshold": "no key: a loss that is not finite stops the run",
    "loss_watchdog_patience": "no key: a loss that is not finite stops the run",
    "early_stopping_patience": "eval.patience",
    "early_stopping_steps": "eval.patience",
    "group_by_length": "no key: the order is drawn anew in each epoch (data.shuffle)",
    "shuffle_merged_datasets": "data.shuffle",
    "shuffle_dataset": "data.shuffle",
    "data_seed": "train.seed, which the order of the data follows too",
    "max_samples": "no key: give a file with as many rows, such as by head -n",
    "streaming": "no key: tokens lie in the run directory, not in memory",
    **dict.fromkeys(("neftune_noise_alpha", "noisy_embedding_alpha"), _LOSS),
    **dict.fromkeys(("label_smoothing_factor", "loss_type", "use_dft_loss", "use_eaft"), _LOSS),
    **dict.fromkeys(("use_asft_loss", "use_eaft_loss", "router_aux_loss_coef"), _LOSS),
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_muon"), _RULE),
    **dict.fromkeys(("use_adam_mini", "loraplus_lr_ratio", "optim_args", "lr_groups"), _RULE),
    **dict.fromkeys(("embedding_lr", "optim_target_modules"), _RULE),
    **dict.fromkeys(("rl", "trl", "pref_loss", "pref_beta", "reward_model"), _PREFERENCES),
    **dict.fromkeys(("pad_to_sequence_len", "pad_to_multiple_of", "padding_free"), _PADDING),
    **dict.fromkeys(("eos_token", "pad_token", "eot_tokens", "default_system"), _TOKENIZER),
    **dict.fromkeys(("tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy"), _TOKENIZER),
    **dict.fromkeys(("use_fast_tokenizer", "default_system_message"), _TOKENIZER),
    "model_type": "model.architecture, a class of transformers; null: what config.json says",
    "model_revision": "model.hf names the directory of the revision that is meant",
    "eval_sample_packing": "data.packing, which held-out data takes too",
    "eval_packing": "data.packing, which held-out data takes too",
    "unfrozen_parameters": "train.freeze, which names the parameters that stay instead",
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector"), _FREEZE),
    "freeze_language_model": _FREEZE,
    "lora_model_dir": "lora.from",
    "adapter_name_or_path": "lora.from",
    "lora_fan_in_fan_out": "no key: PEFT finds it out by the kind of layer",
    "lora_alpha": "lora.lora_alpha",
    "lora_dropout": "lora.lora_dropout",
    "lora_target_parameters": "no key: adapters are beside modules; lora.target_modules names them",
    "model_config": "model.hf, whose config.json says it",
    "disable_gradient_checkpointing": "train.recompute; null chooses what is quicker",
    **dict.fromkeys(("skip_prepare_dataset", "remove_unused_columns", "strict"), _COLUMNS),
    **dict.fromkeys(("hf_use_auth_token", "hf_hub_token"), "no key: nothing is downloaded"),
    **dict.fromkeys(("qat", "fp8", "gptq", "bnb_config_kwargs", "quantize_moe_experts"), _BASE),
    **dict.fromkeys(("expert_parallel_size", "sequence_parallel", "use_kt"), _BUDGETS),
    **dict.fromkeys(("tensor_model_parallel_size", "use_distributed_optimizer"), _BUDGETS),
    "pipeline_model_parallel_size": _BUDGETS,
    "tokenizer_use_mistral_common": _TOKENIZER,
    "processor_type": _TEXT,
    "pissa_init": "lora.init_lora_weights, which PiSSA is not one of: it changes the base itself",
}
"""Keys of theirs, by their last name: what has the meaning here."""

_FAMILIES = {
    **dict.fromkeys(("wandb_", "use_wandb", "mlflow_", "use_mlflow", "comet_"), "report_to"),
    **dict.fromkeys(("use_comet", "trackio_", "use_trackio", "swanlab_"), "report_to"),
    **dict.fromkeys(("use_swanlab", "use_tensorboard", "include_tokens"), "report_to"),
    **dict.fromkeys(("liger_", "flash_attn_", "torch_compile_"), "use_liger_kernel"),
    **dict.fromkeys(("fsdp_", "ddp_", "ds3_", "deepspeed_", "kt_", "ray_"), "deepspeed"),
    **dict.fromkeys(("galore_", "apollo_", "badam_"), "use_galore"),
    **dict.fromkeys(("hub_", "push_"), "push_to_hub"),
    **dict.fromkeys(("image_", "video_", "audio_"), "processor_type"),
    "fp8_": "fp8",
    "dataloader_": "dataloader_num_workers",
}
"""Beginnings of keys, each with the key that has the same answer."""


def elsewhere(key: str) -> str | None:
    """Return what has the meaning of another tool's key here; None for a key that is not known."""
    if key in OTHER_TOOLS:
        return OTHER_TOOLS[key]
    family = next((name for begin, name in _FAMILIES.items() if key.startswith(begin)), None)
    return OTHER_TOOLS[family] if family else None
