"""A library's convolution as a kernel of the python surface, for A/A and for timing references."""

from __future__ import annotations

from torch.nn.functional import conv2d


def run(x, w, stride, pad):
    """y by cuDNN."""
    return conv2d(x, w, stride=stride, padding=pad)
