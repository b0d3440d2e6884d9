"""The devices that a test runs on: always the processor, and a GPU where there is one."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
