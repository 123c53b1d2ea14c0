"""The job in DeepSpeed ZeRO-Infinity, on a CPU or a GPU: parameters and optimizer on the disk.

Settings that its defaults would not give, each with its reason: swap groups of one parameter
(`sub_group_size`; the default of 1e9 swaps, so holds, everything at once), nothing kept in RAM
(`max_in_cpu` 0; the default keeps a billion), rotary buffers back to float32 (its cast rounds them,
and the losses differ from everybody else's).
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from job import BETAS, EPS, LR, WEIGHT_DECAY, Meter, Options, batches, initial_weights, options

ENVIRONMENT = {
    "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29533",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
}


def settings(job: Options, largest: int) -> dict[str, Any]:
    """Return DeepSpeed's config; `largest` is the elements of the largest parameter."""
    pinned = job.device.type == "cuda"
    disk = {"device": "nvme", "nvme_path": str(job.work), "pin_memory": pinned}
    adamw = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "bf16": {"enabled": True},
        "gradient_clipping": job.clip_norm or 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.micro_batches,
        "train_batch_size": job.micro_batches,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_bucket_size": 5e7,
            "sub_group_size": 1e6,
            "stage3_prefetch_bucket_size": 2e7,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e8,
            "stage3_max_reuse_distance": 0,
            "offload_param": {**disk, "buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": {**disk, "buffer_count": 4, "fast_init": False},
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 16,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 1000000,
    }


def drop_duplicate_prefetches() -> None:
    """Mend a fault of 0.19.8: a parameter that is last and first in its trace is fetched twice.

    It ends in "param N already assigned swap buffer id M" in the second step.
    """
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    swapper = partitioned_param_swapper.AsyncPartitionedParameterSwapper
    original = swapper.swap_in

    def swap_in(self: Any, params: Any, async_op: bool = True, swap_in_buffers: Any = None) -> Any:
        if swap_in_buffers is None:
            params = list({p.ds_id: p for p in params}.values())
        return original(self, params, async_op, swap_in_buffers)

    swapper.swap_in = swap_in


def main() -> None:
    """Train; remove the swap files."""
    job = options(__doc__ or "")
    accelerator = job.device.type
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(job.threads), DS_ACCELERATOR=accelerator)
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    drop_duplicate_prefetches()
    shutil.rmtree(job.work, ignore_errors=True)
    job.work.mkdir(parents=True)
    config = LlamaConfig.from_pretrained(job.job)
    largest = config.hidden_size * max(config.vocab_size, config.intermediate_size)
    chosen = settings(job, largest)
    deepspeed.init_distributed(dist_backend="nccl" if accelerator == "cuda" else "gloo")
    try:
        with deepspeed.zero.Init(config_dict_or_path=chosen, dtype=torch.bfloat16):
            model = LlamaForCausalLM(config)
        parameters = dict(model.named_parameters())
        for name, value in initial_weights(job):
            with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
                parameters[name].data.copy_(value)
        model.train()
        engine, *_ = deepspeed.initialize(
            model=model, config=chosen, model_parameters=model.parameters()
        )
        rotary = type(engine.module.model.rotary_emb)(config)
        engine.module.model.rotary_emb = rotary.to(job.device)
        meter = Meter(job.device)
        for step in batches(job):
            meter.begin()
            losses = []
            for ids in (batch.to(job.device) for batch in step):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
            meter.end(losses)
    finally:
        shutil.rmtree(job.work, ignore_errors=True)


if __name__ == "__main__":
    main()
