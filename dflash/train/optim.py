"""AdamW on fp32 master weights, and a schedule without state.

The learning rate is a function of how much of the run is done, so a resumed run needs no scheduler state, and a run
that is bounded by tokens, steps or seconds uses the same cosine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash.errors import TrainingError
from dflash.train.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over the trainable weights; only matrices decay.

    On CUDA one kernel updates the weights in place: the default there keeps an fp32 temporary of each weight, 6.9 GB
    for the 1.73 B drafter.

    Raises:
        TrainingError: a weight isn't fp32. bf16 weights drop updates below 1/256 of their value and end in NaN.
    """
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    wrong = [f"{name} ({weight.dtype})" for name, weight in named if weight.dtype != torch.float32]
    if wrong:
        raise TrainingError(f"Master weights must be float32, found {wrong[:3]}. Call drafter.float() before training.")
    groups = [
        {"params": [weight for _, weight in named if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for _, weight in named if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = True if all(weight.device.type == "cuda" for _, weight in named) else None
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def learning_rate(progress: float, config: OptimizerConfig) -> float:
    """Return the rate at `progress` (0 to 1) of the run: linear warm-up, then a cosine."""
    if progress < config.warmup_share:
        return config.learning_rate * progress / config.warmup_share
    done = min(max((progress - config.warmup_share) / (1 - config.warmup_share), 0.0), 1.0)
    low = config.final_share
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all groups one rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def scale_and_clip(weights: Iterable[nn.Parameter], weight_sum: float, clip_norm: float) -> Tensor:
    """Divide summed gradients by the global weight, clip their norm, and return the norm before clipping.

    Nothing is clipped where the norm isn't finite, so the caller can see it and skip the step.
    """
    grads = [weight.grad for weight in weights if weight.grad is not None]
    torch._foreach_div_(grads, max(weight_sum, 1e-12))  # one launch for all tensors
    norm = nn.utils.get_total_norm(grads)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if torch.isfinite(norm) and norm > clip_norm:
        torch._foreach_mul_(grads, (clip_norm / norm).item())
    return norm
