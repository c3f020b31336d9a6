"""Adam and AdamW in torch with the interface and the state layout of Transformer Engine's and apex's FusedAdam.

The one idea: ``step`` is an int in the parameter group and a parameter's state holds ``exp_avg`` and ``exp_avg_sq`` only.
Megatron-core 0.19.2 has a well-trodden path for that layout; its path for ``torch.optim.AdamW`` cannot resume (one step
tensor is shared by all parameters after a load, and a fresh optimizer cannot be saved).

Refuses FusedAdam's options that need its kernels: ``amsgrad``, ``capturable``, its own master weights, and moments that are
not in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_xorl.errors import PlatformError

__all__ = ["CpuFusedAdam"]


class CpuFusedAdam(torch.optim.Optimizer):
    """Adam (``adam_w_mode=False``: L2 in the gradient) or AdamW (decoupled weight decay) on floating-point parameters.

    Defaults are FusedAdam's. Moments have the parameter's dtype; gradients are read in it. A parameter without a gradient
    is left alone: no state, no weight decay.

    Raises:
        PlatformError: an option that needs FusedAdam's CUDA kernels was given.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        **kernel_options: Any,
    ) -> None:
        """Group ``params`` as ``torch.optim.Optimizer`` does."""
        asked = sorted(name for name, value in kernel_options.items() if value)
        if asked:
            raise PlatformError(
                f"the CPU Adam was given {', '.join(asked)}; it has fp32 state and no CUDA kernels; "
                "leave these options off (in Megatron: no precision-aware optimizer, no optimizer CUDA graph)"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    def initialize_state(self, param: torch.Tensor) -> None:
        """Give a parameter zero moments (FusedAdam's method of this name)."""
        for key in ("exp_avg", "exp_avg_sq"):
            self.state[param][key] = torch.zeros_like(param, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad.to(param.dtype), group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if not self.state[param]:
            self.initialize_state(param)
        state = self.state[param]
        if self.adam_w_mode:
            param.mul_(1 - lr * decay)
        elif decay:
            grad = grad.add(param, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correct1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correct2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        denominator = state["exp_avg_sq"].sqrt().div_(correct2**0.5).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-lr / correct1)
