# id: C7
# mechanism: the framework's softmax, in a case that allows libraries
# case: open/definitions.py:softmax 20x24 fp32
# library: allow
# expect: scored
# source: written for this set
import torch


def run(x):
    return torch.softmax(x, -1)
