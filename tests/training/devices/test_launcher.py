"""GPU shares of the launcher; tests/test_several_processes.py runs it as a whole."""

import pytest

from training.devices.launcher import share_of_gpus
from utils import UserError


def test_the_gpus_of_a_machine_are_divided_among_the_processes(monkeypatch, tmp_path):
    for i in range(4):
        (tmp_path / f"nvidia{i}").touch()
    (tmp_path / "nvidiactl").touch()
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)

    def shares():
        return [share_of_gpus(i, 2, tmp_path)["CUDA_VISIBLE_DEVICES"] for i in range(2)]

    assert shares() == ["0,1", "2,3"]
    message = "--processes 8: there are only 4 GPUs; use at most 4 processes, or set JAX_PLATFORMS"
    with pytest.raises(UserError, match=message):
        share_of_gpus(0, 8, tmp_path)
    (tmp_path / "nvidia0").rename(tmp_path / "nvidia10")  # as in a container
    assert shares() == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert shares() == ["5", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert share_of_gpus(0, 8, tmp_path) == {}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert share_of_gpus(0, 8, tmp_path) == {}
