# id: C12
# mechanism: works in place with the framework, in a case that allows libraries
# case: open/definitions.py:add_norm 20x24 fp32
# library: allow
# expect: scored
# source: written for this set
import torch


def run(x, residual, w, eps=1e-6):
    residual += x
    x.copy_(residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps) * w)
