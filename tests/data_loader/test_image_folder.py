"""Images in one folder per class: labels from sorted names, lazy reading, damaged files named."""

import io
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from data_loader import images
from data_loader.base import fingerprint
from data_loader.folder import folder
from data_loader.images import pixels
from data_loader.loader import batches, collate, epoch_order, split
from data_loader.records import tf_example
from tests.data_loader.test_records import example_of
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


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def saved(array, format, **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize("content", [EPS, saved(np.zeros((4, 4), np.uint8), "PCX")])
def test_only_the_formats_of_its_endings_are_decoded(tmp_path, monkeypatch, content):
    """Pillow goes by the content: it would start Ghostscript for an EPS file, whatever its name."""

    def start(*_args, **_kwargs):
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.png: not a readable image \(it is none of PNG, JPEG"):
        pixels(tmp_path / "x.png", (4, 4), "rgb")
    with pytest.raises(UserError, match="it is none of PNG, JPEG"):
        tf_example(example_of(content), image_size=(4, 4))


WIDE = np.array([[0, 128, 129, 256], [257, 32768, 65406, 65535]], np.uint16)


@pytest.mark.parametrize(("format", "ending"), [("PNG", "png"), ("TIFF", "tif"), ("PPM", "pgm")])
@pytest.mark.parametrize("color", ["gray", "rgb"])
def test_16_bits_are_scaled_to_8(tmp_path, format, ending, color):
    path = tmp_path / f"x.{ending}"
    path.write_bytes(saved(WIDE, format))
    expected = np.rint(WIDE / 257).astype(np.uint8)[..., None]
    assert (pixels(path, (2, 4), color) == expected).all()


@pytest.mark.parametrize("side", [8193, 20_000])  # Pillow itself refuses the second one
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path, side, monkeypatch):
    small = saved(np.zeros((1, 1), np.uint8), "GIF")
    large = small[:6] + 2 * side.to_bytes(2, "little") + small[10:]
    monkeypatch.setattr(Image.Image, "load", None)
    (tmp_path / "x.gif").write_bytes(large)
    with pytest.raises(UserError, match=r"x\.gif: not a readable .*at most 67,108,864 are decoded"):
        pixels(tmp_path / "x.gif", (1, 1), "rgb")


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
        (
            lambda root: shutil.copytree(root / "test" / "ants", root / "train" / "cats" / "2020"),
            r"2020/\d\.\w+: is in a folder within .*cats, .*; move it into .*cats",
        ),
        (
            lambda root: [(root / s).rename(root / s.title()) for s in ("train", "test")],
            r"Test/ants/\d\.\w+: is in a folder .*; the folders of sets are called train, val and",
        ),
        (
            lambda root: shutil.copy(root / "test" / "ants" / "1.png", root / "train" / "1.png"),
            r"train/1\.png: is in no class; move it",
        ),
        (
            lambda root: (root / "test" / "cats" / "a.HEIC").write_bytes(b"?"),
            r"cats/a\.HEIC: images with the ending \.HEIC are not read; convert it",
        ),
    ],
    ids=[
        *["unknown class", "unknown set", "empty class", "no folder", "no classes"],
        *["nested", "other names of sets", "no class", "other format"],
    ],
)
def test_a_wrong_folder_layout_is_named(root, change, message):
    change(root)
    with pytest.raises(UserError, match=message):
        folder(str(root), [2, 2])


def test_folders_without_images_and_hidden_files_are_allowed_in_a_class(root):
    for name in ("notes", "notes.png", ".thumbnails"):
        (root / "train" / "ants" / name).mkdir()
    (root / "train" / "ants" / "notes" / "a.txt").write_text("no image")
    shutil.copy(root / "test" / "ants" / "1.png", root / "train" / "ants" / ".thumbnails")
    shutil.copy(root / "test" / "ants" / "1.png", root / "train" / ".cover.png")
    assert folder(str(root), [2, 2]).sizes == {"train": 6, "test": 4}


def photographs(root, count, size=(80, 60)):
    """JPEG files that all differ, in two classes."""
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 256, (6, 8, 3), np.uint8)
        path = root / "train" / "ab"[i % 2] / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)


def read(root, order, start=0, collate_fn=collate, **arguments):
    """All batches of an order, with as many threads and as large a cache as the arguments say."""
    dataset = folder(str(root), [9, 12], **arguments).load()["train"]
    return list(batches(dataset, order, collate_fn, start))


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("start", [0, 2])
def test_batches_are_the_same_for_any_number_of_threads_and_any_start(tmp_path, threads, start):
    photographs(tmp_path, 41)
    order, _ = epoch_order(41, 12, seed=3, epoch=2, shuffle=True)
    dataset = folder(str(tmp_path), [9, 12], cache_mb=0).load()["train"]
    actual = read(tmp_path, order, start, threads=threads)
    assert len(actual) == 4 - start
    for row, (x, y) in zip(order[start:], actual, strict=True):
        examples = [dataset[int(i)] for i in row]  # one by one, in this thread
        np.testing.assert_array_equal(x, [image for image, _ in examples], strict=True)
        np.testing.assert_array_equal(y, [label for _, label in examples], strict=True)


def test_decoded_images_are_kept_within_the_budget_and_a_batch_may_be_changed(tmp_path):
    photographs(tmp_path, 20, size=(200, 200))
    arguments = {"image_size": [200, 200], "threads": 2}
    order = np.arange(20).reshape(2, 10)

    def changes(examples):
        for image, _ in examples:
            image[:] = 255 - image
        return collate(examples)

    whole = folder(str(tmp_path), **arguments).load()["train"]
    part = folder(str(tmp_path), cache_mb=1, **arguments).load()["train"]
    assert len(part.cache) == 2**20 // (200 * 200 * 3) == 8
    assert "20 decoded images are kept in 2.3 MiB" in whole.source
    assert "8 decoded images are kept in 937.5 KiB" in part.source
    assert "only 8 of 20 decoded images are kept: raise data.args.cache_mb, to 3 " in part.advice
    first = [(255 - x, y) for x, y in batches(whole, order, changes)]
    list(batches(part, order))
    for path, _ in whole.files[:8]:
        path.unlink()
    held_out, _ = split(part, 12, seed=0)
    assert (held_out.source, held_out.advice) == (part.source, part.advice)
    for (x, y), (kept, labels) in zip(first, batches(whole, order), strict=True):
        assert (x == kept).all() and (y == labels).all()
    ((partly, _),) = batches(part, order[:1, :8])
    assert (partly == first[0][0][:8]).all()
    whole.files[9][0].unlink()
    with pytest.raises(UserError, match=r"not a readable image"):
        list(batches(part, order))


@pytest.mark.parametrize("turned", [False, True])
def test_a_large_jpeg_file_is_decoded_at_a_smaller_size_and_looks_the_same(
    tmp_path, monkeypatch, turned
):
    photographs(tmp_path, 1, size=(800, 600))
    (path,) = (tmp_path / "train" / "a").iterdir()
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    image = Image.open(path)
    image.load()
    image.save(path, exif=exif, quality=90)
    sizes, keep = [], images.with_8_bits
    monkeypatch.setattr(
        images, "with_8_bits", lambda image, _: sizes.append(image.size) or keep(image, _)
    )
    small = pixels(path, (60, 40), "rgb")
    upright = image.transpose(Image.Transpose.ROTATE_270) if turned else image
    expected = np.asarray(upright.resize((40, 60), Image.Resampling.BILINEAR), np.int16)
    assert sizes == [(150, 200) if turned else (200, 150)]  # a quarter: 120 is twice the 60
    assert np.abs(small - expected).mean() < 1.5 and np.abs(small - expected).max() < 12
    pixels(path, (400, 400), "rgb")
    assert sizes[-1] == ((600, 800) if turned else (800, 600))


def test_a_missing_pillow_is_a_clear_error(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="pip install pillow"):
        folder(str(root), [2, 2])


@pytest.mark.parametrize("image_size", [[4], [4, 0], [1, 2, 3], []])
def test_image_size_is_checked(root, image_size):
    with pytest.raises(ValueError, match=r"^image_size: must be"):
        folder(str(root), image_size)
