# id: C8
# mechanism: returns both outputs in a tuple
# case: topk 6x32x4 fp32
# expect: scored
# source: written for this set
import array
import ctypes

import torch


def tensor(kind, dtype, rows):
    data = array.array(kind, [value for row in rows for value in row])
    made = torch.empty(len(rows), len(rows[0]), dtype=dtype)
    ctypes.memmove(made.data_ptr(), data.buffer_info()[0], len(data) * data.itemsize)
    return made


def run(x, k=4):
    order = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:4] for row in x.tolist()]
    values = [[row[i] for i in chosen] for row, chosen in zip(x.tolist(), order, strict=True)]
    return tensor("f", torch.float32, values), tensor("q", torch.int64, order)
