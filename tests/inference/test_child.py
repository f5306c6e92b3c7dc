"""Calls in a child process: results, errors, a process that ends, and Ctrl-C."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from inference.child import Child, Crash
from tests.inference.crashes import read_address_0, refuse, say_why_and_abort
from utils import RunError, UserError


@pytest.fixture(scope="module")
def child():
    with Child() as started:
        yield started


def test_a_call_returns_what_the_function_returns(child):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(child.call("adding", np.add, array, array), 2 * array)
    assert child.call("asking for its number", os.getpid) != os.getpid()


@pytest.mark.parametrize("kind", [UserError, RunError, ValueError])
def test_a_call_raises_what_the_function_raises(child, kind):
    process = child.call("asking for its number", os.getpid)
    with pytest.raises(RuntimeError if kind is ValueError else kind, match="the reason"):
        child.call("refusing", refuse, kind)
    assert child.call("asking for its number", os.getpid) == process


@pytest.mark.parametrize(
    ("function", "args", "how"),
    [
        (read_address_0, (), "Segmentation fault"),
        (say_why_and_abort, (), r"Aborted \(Check failed: rank == 2 \(3 vs. 2\)\)"),
        (os._exit, (7,), "exit code 7"),
        (os.kill, (0, signal.SIGKILL), "Killed; .* when memory runs out"),
    ],
)
def test_a_call_that_ends_the_process_is_an_error_that_names_the_step(child, function, args, how):
    if function is os.kill:
        args = (child.call("asking for its number", os.getpid), signal.SIGKILL)
    with pytest.raises(Crash, match=f"^measuring samples ended its process: {how}"):
        child.call("measuring samples", function, *args)
    assert child.call("adding", sum, [1, 2]) == 3  # in a new process


def test_ctrl_c_ends_a_call_and_its_process(ctrl_c):
    with Child() as child:
        process = child.call("asking for its number", os.getpid)
        start = time.monotonic()
        threading.Timer(0.1, ctrl_c).start()
        with pytest.raises(KeyboardInterrupt):
            child.call("sleeping", time.sleep, 60)
        assert time.monotonic() - start < 10
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        assert child.call("adding", sum, [1, 2]) == 3  # not the reply of the call before
