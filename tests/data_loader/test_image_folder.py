"""Images in one folder per class: labels from sorted names, lazy reading, damaged files named."""

import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from data_loader.folder import folder
from data_loader.loader import batches, fingerprint, split
from utils import UserError


@pytest.fixture
def root(tmp_path):
    """train/ and test/, both with cats (red, 8x6), ants (blue, 5x9) and a file of notes."""
    for set_name, count in (("train", 3), ("test", 2)):
        for name, color, size in (("cats", (255, 0, 0), (8, 6)), ("ants", (0, 0, 255), (5, 9))):
            folder = tmp_path / set_name / name
            folder.mkdir(parents=True)
            (folder / "notes.txt").write_text("not an image")
            for i in range(count):
                Image.new("RGB", size, color).save(folder / f"{i}.{'png' if i else 'PNG'}")
    return tmp_path


def test_labels_sizes_and_colours(root):
    data = folder(str(root), [4, 7])
    assert data.sizes == {"train": 6, "test": 4} and data.num_classes == 2
    sets = data.load()
    assert data.classes == ("ants", "cats")
    examples = [sets["train"][i] for i in range(6)]
    assert [int(label) for _, label in examples] == [0, 0, 0, 1, 1, 1]
    for image, label in examples:
        assert image.shape == data.example[0].shape == (4, 7, 3) and image.dtype == np.uint8
        assert (image == ([255, 0, 0] if label else [0, 0, 255])).all()


def test_gray_has_one_channel(root):
    image, _ = folder(str(root), [4, 4], "gray").load()["test"][3]
    assert image.shape == (4, 4, 1) and (image == 76).all()  # 0.299 of 255


def test_class_folders_without_train_are_one_training_set_which_can_be_split(root):
    data = folder(str(root / "train"), [2, 2])
    assert data.sizes == {"train": 6}
    train, val = split(data.load()["train"], 2, seed=0)
    ((images, labels),) = batches(train, np.arange(4)[None])
    assert images.shape == (4, 2, 2, 3) and labels.dtype == np.int32 and len(val) == 2
    assert fingerprint(train) == fingerprint(train)


def test_an_image_is_read_only_when_it_is_used(root):
    (root / "train" / "ants" / "1.png").write_bytes(b"not a picture")
    dataset = folder(str(root), [2, 2]).load()["train"]
    dataset[0]
    with pytest.raises(UserError, match=r"ants/1\.png: not a readable image"):
        dataset[1]


def test_a_truncated_image_is_named(root):
    path = root / "train" / "cats" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"cats/1\.png: not a readable image"):
        folder(str(root), [2, 2]).load()["train"][4]


def test_a_rotated_photograph_is_turned_upright(root):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255  # bright above
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    Image.fromarray(pixels).save(root / "train" / "ants" / "0.PNG", exif=exif)
    image, _ = folder(str(root), [8, 8]).load()["train"][0]
    assert image[0].max() == 0 and image[7].min() == 255


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: (root / "test" / "dogs").mkdir(),
            r"test: has the class 'dogs', training has only ants, cats",
        ),
        (
            lambda root: (root / "valid").mkdir(),
            r"has the folder 'valid' beside train; allowed: train, val, test",
        ),
        (
            lambda root: [file.unlink() for file in (root / "train" / "ants").iterdir()],
            r"ants: no images in it",
        ),
        (lambda root: root.rename(root.with_name("elsewhere")), "no such folder"),
        (
            lambda root: [shutil.rmtree(root / name) for name in ("train", "test")],
            "no folders in it",
        ),
    ],
    ids=["unknown class", "unknown set", "empty class", "no folder", "no classes"],
)
def test_a_wrong_folder_layout_is_named(root, change, message):
    change(root)
    with pytest.raises(UserError, match=message):
        folder(str(root), [2, 2])


def test_a_class_may_be_missing_in_the_test_set(root):
    shutil.rmtree(root / "test" / "ants")
    sets = folder(str(root), [2, 2]).load()
    assert [int(sets["test"][i][1]) for i in range(2)] == [1, 1]


def test_a_missing_pillow_is_a_clear_error(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="pip install pillow"):
        folder(str(root), [2, 2])


@pytest.mark.parametrize("image_size", [[4], [4, 0], [1, 2, 3], []])
def test_image_size_is_checked(root, image_size):
    with pytest.raises(ValueError, match=r"^image_size: must be"):
        folder(str(root), image_size)
