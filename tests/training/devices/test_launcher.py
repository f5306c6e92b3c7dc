"""Messages and GPU shares of the launcher; tests/test_several_processes.py runs it as a whole."""

import io

import pytest

from training.devices.launcher import describe, forward, share_of_gpus
from utils import UserError

HINT = ". --resume auto continues from the last checkpoint, if there is one"


@pytest.mark.parametrize(
    ("code", "reason", "hint"),
    [
        (-9, "was ended by SIGKILL", HINT),
        (2, "ended with exit code 2", ""),
        (None, "did not end within 90 seconds of the others", HINT),
    ],
)
def test_describe_gives_the_reason_and_how_to_continue(code, reason, hint):
    assert describe(1, code) == f"Process 1 {reason}, so all are ended{hint}"


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


def test_messages_of_cpp_about_the_end_of_another_process_are_left_out():
    lines = [
        "[Gloo] Rank 1 is connected to 1 peer ranks.\n",
        "F1122 03:19:00.123456   14911 client.h:80] Terminating process because the JAX "
        "distributed service failed\n",
        "    @     0x7fab95aee709  absl::lts_20250814::log_internal::LogMessage::Die()\n",
        "W1122 03:19:01.123456   14911 bfc_allocator.cc:501] Allocator ran out of memory\n",
        "ours\n",
    ]
    out = io.StringIO()
    forward(1, lines, out, {})
    assert out.getvalue() == f"[1] {lines[3]}[1] ours\n"
