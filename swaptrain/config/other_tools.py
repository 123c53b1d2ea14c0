"""What the keys of other tools are called here: Trainer, TRL, Axolotl, LLaMA-Factory."""

from __future__ import annotations

__all__ = ["OTHER_TOOLS"]

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
    "report_to": _REPORT,
    "use_tensorboard": _REPORT,
    "use_trackio": _REPORT,
    "wandb_project": _REPORT,
    "bf16": "model.dtype: bfloat16",
    "fp16": "model.dtype: bfloat16 or float32; float16 is not trained in",
    "torch_dtype": "model.dtype",
    "gradient_checkpointing": "train.recompute; null chooses what is quicker",
    "dataloader_num_workers": "data.workers",
    "resume_from_checkpoint": _STEADY,
    "auto_resume_from_checkpoints": _STEADY,
    "deepspeed": _BUDGETS,
    "fsdp": _BUDGETS,
    "device_map": _BUDGETS,
    "special_tokens": "no key: the tokenizer's own files name them",
}
"""Keys of theirs, by their last name: what has the meaning here."""
