"""What the loop makes of a user's own watchers."""

import numpy as np
import pytest
from training.watchers import NEVER, Reply

from model.mlp import mlp
from training.fit import fit
from training.optimizers import sgd
from utils import UserError

X = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
Y = np.arange(64) % 3


def run_with(*watchers, folder=None, width=8):
    return fit(
        *(mlp((256,), 3, dims=(width,)), (X, Y)),
        **{"optimizer": sgd(lr=0.01), "epochs": 3, "batch_size": 16},
        **{"watchers": list(watchers), "folder": folder},
    )


def watcher(**methods):
    """An object with these methods, which do not need it."""
    return type("Mine", (), {name: staticmethod(method) for name, method in methods.items()})()


class Copies:
    """Takes the Snapshot of every checkpoint, and compares it with the weights at that moment."""

    def __init__(self):
        self.seen = []

    def on_save(self, run, take, kind):
        snapshot = take()
        assert take() is snapshot
        now = np.array(run.params["head"]["weight"])
        np.testing.assert_array_equal(snapshot.states[0].params["head"]["weight"], now)
        self.seen.append(snapshot.record["step"])


def test_every_watcher_can_have_the_snapshot_that_is_written(tmp_path):
    copies = Copies()
    run_with(copies, folder=tmp_path / "run", width=4096)
    assert copies.seen == [4, 8, 12]


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (watcher(steps_left=lambda ahead: 0), "Mine.steps_left returned 0; it must be an integer"),
        (watcher(steps_left=lambda ahead: 1.5), "Mine.steps_left returned 1.5; it must be an"),
        (watcher(on_chunk=lambda *_: {"stop": "x"}), "Mine.on_chunk returned {'stop': 'x'}; retur"),
        (watcher(on_ready=lambda _: Reply(save="lst")), "Mine.on_ready: save is 'lst'; it must be"),
        (
            watcher(on_values=lambda *_: Reply(back_to=1)),
            "Mine.on_values: only on_chunk, on_bad_st",
        ),
        (watcher(on_pause=lambda _: Reply(save="last")), "Mine.on_pause: cannot reply with save"),
        (Copies, r"Copies is a class, not a watcher; write Copies\(\.\.\.\)"),
        (watcher(on_step=print), "Mine has 'on_step', which is not an event"),
    ],
)
def test_mistakes_of_a_watcher_are_named(mine, message):
    with pytest.raises(UserError, match=f"watchers: {message}"):
        run_with(mine)


def test_an_integer_of_numpy_is_a_number_of_steps():
    seen = []
    mine = watcher(
        steps_left=lambda ahead: np.int64(3 - ahead.step % 3),
        on_chunk=lambda run, report: seen.append(run.step),
    )
    assert run_with(mine).step == 12 and {3, 6, 9, 12} <= set(seen)
    assert run_with(watcher(steps_left=lambda ahead: NEVER)).step == 12


def test_the_first_interruption_is_kept_and_the_most_complete_checkpoint_is_saved():
    kinds = []
    replies = Reply(interrupt="SIGTERM", save="best"), Reply(interrupt="the sweep", save="whole")
    watchers = [watcher(on_epoch_end=lambda run, reply=reply: reply) for reply in replies]
    run = run_with(*watchers, watcher(on_save=lambda run, take, kind: kinds.append(kind)))
    assert (run.completed, run.signal, kinds) == (1, "SIGTERM", ["whole"])


@pytest.mark.parametrize(("result", "published"), [(None, True), (False, False)])
def test_a_run_says_whether_a_watcher_was_stuck_when_it_was_closed(result, published):
    assert run_with(watcher(close=lambda run: result)).published == published


def test_an_overdue_watcher_is_due_after_the_next_chunk():
    seen = []
    mine = watcher(
        overdue=lambda ahead: True,
        on_chunk=lambda run, report: seen.append(mine in report.due),
    )
    run_with(mine)
    assert seen and all(seen)
