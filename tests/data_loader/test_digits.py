"""The drawn digits: reproducible, balanced, legible, not too easy; a damaged cache is replaced."""

import numpy as np
import pytest

from data_loader import digits as drawn_digits
from data_loader.base import loaded
from data_loader.digits import digits


@pytest.fixture(scope="module")
def drawn():
    from data_loader.digits import draw

    x, y = draw(0, 6000)
    return x[:5000], y[:5000], x[5000:], y[5000:]


def test_shapes_types_and_balance():
    data = digits(train_size=1000, test_size=500)
    assert data.sizes == {"train": 1000, "test": 500} and data.num_classes == 10
    for key, dataset in data.load().items():
        x, y = dataset.arrays
        assert x.shape == (data.sizes[key], 28, 28, 1)
        assert x.dtype == np.uint8 and y.dtype == np.int32
        assert (x[0].shape, x.dtype) == (data.example[0].shape, data.example[0].dtype)
        assert (np.bincount(y) == data.sizes[key] / 10).all()
        assert x.min() == 0 and x.max() == 255


def test_the_seed_decides_every_pixel(monkeypatch):
    def images(seed, cache):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        return digits(seed, 300, 20).load()["train"].arrays[0]

    one, again, other = images(1, "/dev/null/a"), images(1, "/dev/null/b"), images(2, "/dev/null/a")
    assert (one == again).all()
    # No image occurs twice, within a seed or in both.
    assert len({image.tobytes() for image in (*one, *other)}) == 600


@pytest.mark.slow
def test_labels_are_in_random_order(drawn):
    y = drawn[1]
    assert 0.05 < (np.diff(y) == 0).mean() < 0.15 and 0.05 < (np.diff(y) == 1).mean() < 0.15


def test_a_linear_classifier_is_good_but_not_perfect(drawn):
    x, y, test_x, test_y = drawn

    def features(images):
        return np.concatenate([images.reshape(len(images), -1) / 255, np.ones((len(images), 1))], 1)

    a = features(x)
    weights = np.linalg.solve(a.T @ a + 10 * np.eye(a.shape[1]), a.T @ np.eye(10)[y])
    correct = (features(test_x) @ weights).argmax(1) == test_y
    assert 0.6 < correct.mean() < 0.93
    for digit in range(10):
        assert correct[test_y == digit].mean() > 0.35  # every digit is legible


def test_the_second_load_comes_from_the_cache(cache, monkeypatch):
    first = digits(3, 40, 10).load()
    (file,) = cache.iterdir()
    monkeypatch.setattr("data_loader.digits.draw", lambda *_: pytest.fail("drawn again"))
    second = digits(3, 40, 10).load()
    for a, b in zip(first["test"].arrays, second["test"].arrays, strict=True):
        assert (a == b).all()
    assert list(cache.iterdir()) == [file]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b[: len(b) // 2],
        lambda b: b"?" * 50,
        lambda b: b[:2000] + b"????" + b[2004:],
    ],
    ids=["empty", "cut", "nonsense", "flipped"],
)
def test_a_damaged_cache_is_replaced(cache, damage):
    first = digits(3, 40, 10).load()["train"].arrays[0]
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert (digits(3, 40, 10).load()["train"].arrays[0] == first).all()
    assert len(file.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written_is_one_warning_and_no_error(cache, warnings_seen):
    cache.parent.write_text("a file where the folder should be")
    assert len(digits(0, 20, 10).load()["train"]) == 20
    assert len(warnings_seen) == 1 and str(cache) in warnings_seen[0]


def test_the_sets_of_pen_digits_are_as_they_promise():
    sets = loaded(drawn_digits.pen_digits(train_size=30, test_size=10))
    assert len(sets["train"]) == 30 and sets["test"][0][0]["sequence"].shape == (48, 3)
