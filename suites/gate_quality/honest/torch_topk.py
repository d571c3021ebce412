# id: C7
# mechanism: the framework's sort, whose order of equal values is the operator's, where libraries are allowed
# case: topk 6x32x4 fp32
# library: allow
# expect: scored
# source: written for this set
import torch


def run(x, k=4):
    values, indices = torch.sort(x, dim=1, descending=True, stable=True)
    return values[:, :4].contiguous(), indices[:, :4].contiguous()
