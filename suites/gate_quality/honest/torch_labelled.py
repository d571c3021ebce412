# id: C7
# mechanism: the framework's product, in a case that labels libraries
# case: gemm 48x40x56 fp32
# library: label
# expect: scored
# source: written for this set
import torch


def run(a, b):
    return torch.mm(a, b)
