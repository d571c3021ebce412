# id: C7
# mechanism: NumPy's product, in a case that allows libraries
# case: gemm 48x40x56 fp32
# library: allow
# expect: scored
# source: written for this set
import numpy
import torch


def run(a, b):
    return torch.from_numpy(numpy.matmul(a.numpy(), b.numpy()))
