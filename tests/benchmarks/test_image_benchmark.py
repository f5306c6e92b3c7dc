"""The benchmark of image folders: both sides train on the files that it makes, at a tiny size."""

import pytest

from benchmarks import image_folder


@pytest.mark.torture
def test_both_sides_train_on_the_same_files_and_the_table_names_the_share(tmp_path):
    pytest.importorskip("torch")
    image_folder.make_images(tmp_path, 10)
    assert len(list(tmp_path.glob("train/*/*.jpg"))) == 10
    epochs = image_folder.measured(str(tmp_path), 16, 2, 1)
    for (seconds, waited, images), second in (rounds[0] for rounds in epochs.values()):
        assert 0 <= waited <= seconds and images == second[2] == 10
    table, result = image_folder.blocks_of(epochs, 16)
    assert "target: under 30 %" in result and len(table.splitlines()) == 5
