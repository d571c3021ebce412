# id: C5
# mechanism: a class with generators and dunder methods
# case: gemm 8x8x8 fp32
# expect: scored
# source: written for this set
import baseline_output
import torch


class Rows:
    def __init__(self, a, b):
        self.rows, self.columns = a.tolist(), list(zip(*b.tolist(), strict=True))

    def __iter__(self):
        for row in self.rows:
            yield from (self.dot(row, column) for column in self.columns)

    @staticmethod
    def dot(left, right):
        return sum(x * y for x, y in zip(left, right, strict=True))


def run(a, b):
    return baseline_output.store(Rows(a, b), torch.empty(a.shape[0], b.shape[1]))
