# id: C7
# mechanism: NumPy sorts and returns a tuple, in a case that allows libraries
# case: topk 6x32x4 fp32
# library: allow
# expect: scored
# source: written for this set
import numpy
import torch


def run(x, k=4):
    order = numpy.argsort(-x.numpy(), axis=1, kind="stable")[:, :4]
    values = numpy.take_along_axis(x.numpy(), order, axis=1)
    return torch.from_numpy(values), torch.from_numpy(order.astype(numpy.int64))
