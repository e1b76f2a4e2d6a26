"""BatchNorm over the global batch, on any device and with any number of samples per rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline._torch_internals import AffineBatchNorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that also works on CPU. Statistics are those of all samples of all
    ranks.

    A rank weighs as much as it has samples, none if it has none. Only a training forward
    communicates.

    Args:
        num_features: channels of the input; the others are those of torch's class as well.
        process_group: whose samples count; the default group.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        model = paceline.SyncBatchNorm.convert_sync_batchnorm(model)
        model = paceline.DistributedDataParallel(model)
        ```
    """

    # Set by DistributedDataParallel before each forward: what this rank's loss weighs in the
    # average over ranks, up to a factor that all ranks share.
    loss_weight = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        training = self.training or (self.running_mean is None and self.running_var is None)
        group = self.process_group if self.process_group is not None else _default_group()
        if not training or group is None or dist.get_world_size(group) == 1:
            return torch.nn.functional.batch_norm(
                input,
                self.running_mean if not self.training or self.track_running_stats else None,
                self.running_var if not self.training or self.track_running_stats else None,
                self.weight,
                self.bias,
                training,
                self._momentum(),
                self.eps,
            )
        result: tuple[torch.Tensor, ...] = _GlobalNorm.apply(  # type: ignore[no-untyped-call] # torch's
            input, self.weight, self.bias, self.eps, group, self.loss_weight
        )
        output, mean, variance, count = result
        self._update_statistics(mean, variance, float(count))
        return output

    def _momentum(self) -> float:
        """The factor of the running average; counts the batch when it is cumulative."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self._momentum()
        unbiased = variance * (count / max(count - 1, 1))
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: Any = None
    ) -> torch.nn.Module:
        """Replace every BatchNorm layer (also torch's SyncBatchNorm) below `module` by this one."""
        converted = module
        if isinstance(module, AffineBatchNorm):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted


class _GlobalNorm(torch.autograd.Function):
    """Normalise with the mean and variance over all ranks; both directions need one exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: Any,
        loss_weight: float,
    ) -> tuple[torch.Tensor, ...]:
        mean, variance, count = _global_statistics(data, group)
        inverse = torch.rsqrt(variance + eps)
        normed = (data - _spread(mean, data)) * _spread(inverse, data)
        output = normed
        if weight is not None:
            output = output * _spread(weight, data)
        if bias is not None:
            output = output + _spread(bias, data)
        ctx.save_for_backward(normed, inverse, weight)
        ctx.group, ctx.count, ctx.has_bias = group, count, bias is not None
        ctx.loss_weight = loss_weight
        tensors = output.to(data.dtype), mean, variance, torch.tensor(count)
        ctx.mark_non_differentiable(*tensors[1:])
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        normed, inverse, weight = ctx.saved_tensors
        grad = grads[0]
        others = [dim for dim in range(grad.dim()) if dim != 1]
        total = grad.sum(others)
        along = (grad * normed).sum(others)
        grad_data = None
        if ctx.needs_input_grad[0]:
            # The gradient of the whole is the sum of every rank's part times its weight; divided by
            # its own weight it is what the average over ranks will multiply by that weight again. A
            # rank that weighs nothing may compute anything: its gradient is not used.
            both = torch.stack([total, along])
            both = both * ctx.loss_weight if ctx.loss_weight else torch.zeros_like(both)
            dist.all_reduce(both, group=ctx.group)
            mean_total, mean_along = both / (ctx.count * (ctx.loss_weight or 1.0))
            centred = grad - _spread(mean_total, grad) - normed * _spread(mean_along, grad)
            factor = inverse if weight is None else inverse * weight
            grad_data = centred * _spread(factor, grad)
        return (
            grad_data,
            along if weight is not None else None,
            total if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _global_statistics(data: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean and variance per channel over all ranks, each rank weighing its samples."""
    others = [dim for dim in range(data.dim()) if dim != 1]
    count = data.numel() // max(data.shape[1], 1)
    wide = data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
    if count:
        mean, variance = wide.mean(others), wide.var(others, unbiased=False)
    else:
        mean = variance = wide.new_zeros(data.shape[1])
    mine = torch.cat([mean, variance, mean.new_tensor([count])])
    table = mine.new_zeros(dist.get_world_size(group), mine.numel())
    table[dist.get_rank(group)] = mine
    dist.all_reduce(table, group=group)
    channels = data.shape[1]
    means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    samples = counts.sum()
    mean = (means * counts).sum(0) / samples
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / samples
    return mean, variance, float(samples)


def _spread(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
