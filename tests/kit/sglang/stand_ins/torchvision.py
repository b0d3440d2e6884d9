"""Stands in for torchvision, whose wheels need a torch for CUDA: it is imported, for pictures alone."""

from tests.kit.sglang.every_name import have_every_name

__version__ = "0.0"

have_every_name(__name__)
