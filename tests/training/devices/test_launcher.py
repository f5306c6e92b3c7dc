"""What the launcher says and shares out; whole runs by it are in tests/test_several_processes.py."""

import io

import pytest

from training.devices.launcher import describe, share_of_gpus, tell
from utils import UserError


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            -9,
            "Process 1 was ended by SIGKILL, so all are ended. --resume auto goes on from the last checkpoint, if there is one",
        ),
        (2, "Process 1 ended with exit code 2, so all are ended"),
        (
            None,
            "Process 1 did not end within 90 seconds of the others, so all are ended. --resume auto goes on",
        ),
    ],
)
def test_the_launcher_says_what_became_of_a_process(code, told):
    assert describe(1, code).startswith(told)


def test_the_gpus_of_a_machine_are_shared_out(monkeypatch, tmp_path):
    for i in range(4):
        (tmp_path / f"nvidia{i}").touch()
    (tmp_path / "nvidiactl").touch()
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    assert [share_of_gpus(i, 2, tmp_path)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == [
        "0,1",
        "2,3",
    ]
    with pytest.raises(
        UserError,
        match=r"--processes 8: there are 4 GPUs; take so many at most, or set JAX_PLATFORMS=cpu",
    ):
        share_of_gpus(0, 8, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [share_of_gpus(i, 2, tmp_path)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["5", "7"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert share_of_gpus(0, 8, tmp_path) == {}


def test_what_is_said_in_c_of_the_end_of_another_is_left_out():
    lines = [
        "[Gloo] Rank 1 is connected to 1 peer ranks.\n",
        "F1122 03:19:00.123456   14911 client.h:80] Terminating process because the JAX distributed service failed\n",
        "    @     0x7fab95aee709  absl::lts_20250814::log_internal::LogMessage::Die()\n",
        "W1122 03:19:01.123456   14911 bfc_allocator.cc:501] Allocator ran out of memory\n",
        "mine\n",
    ]
    out = io.StringIO()
    tell(1, lines, out, {})
    assert out.getvalue() == f"[1] {lines[3]}[1] mine\n"
