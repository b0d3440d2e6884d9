"""The devices on which tests run: always the CPU, and a GPU in tests marked `gpu`."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
