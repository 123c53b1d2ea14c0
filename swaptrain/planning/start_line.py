"""What a start of training says of itself and expects of its steps, for starts.jsonl."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version

import torch

import swaptrain
from swaptrain.config.schema import Config
from swaptrain.machine.fingerprint import this_machine
from swaptrain.observe.starts import Expected, StartLine
from swaptrain.observe.step_metrics import time_stamp
from swaptrain.planning.planner import Plan
from swaptrain.planning.ram_budget import useful_bytes
from swaptrain.planning.step_bytes import least_bytes
from swaptrain.planning.step_cost import Price

__all__ = ["start_line"]


def start_line(
    config: Config, plan: Plan, price: Price, device: torch.device, first_step: int
) -> StartLine:
    """Return the line of a start whose plan is made and whose position is known."""
    model, traffic = plan.captured.model, price.traffic
    return StartLine(
        time=time_stamp(),
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=_versions(),
        machine=this_machine(device),
        device=str(device),
        threads=torch.get_num_threads(),
        parameters=model.parameter_count,
        segments=len(model.segments),
        first_step=first_step,
        last_step=config.train.last_step,
        forecast=Expected(
            step_s=price.step_s,
            compute_s=price.compute_s,
            read_bytes=None if traffic is None else traffic.read_bytes,
            write_bytes=None if traffic is None else traffic.write_bytes,
            least_traffic_bytes=least_bytes(plan, config),
            host_bytes=config.memory.host,
            base_bytes=plan.base_bytes,
            pool_bytes=plan.pool_bytes,
            arena_bytes=plan.arena_bytes,
            peak_host_bytes=min(plan.pool_bytes, useful_bytes(plan)) + plan.arena_bytes,
            segments_saving=len(plan.builder.saves),
        ),
    )


def _versions() -> dict[str, str]:
    found = {"swaptrain": swaptrain.__version__, "torch": str(torch.__version__)}
    try:
        found["transformers"] = version("transformers")
    except PackageNotFoundError:
        found["transformers"] = "none"
    return found | {"python": platform.python_version()}
