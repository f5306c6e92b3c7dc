"""The forms of layers: what the sweep draws, that it continues, and what it reports."""

import pytest

from benchmarks import forms
from benchmarks.form_shapes import DRAWS, Layer, fixed_layers, layer_norm, layer_of
from model.layers.conv_forms import banded_rows, shifted


def layer(chosen="a", kind="linear"):
    return Layer(kind, "2x3", [(2, 3)], {"a": None, "b": None}, chosen)


def test_a_seed_draws_the_same_layers_of_every_kind():
    layers = [layer_of(0, i) for i in range(120)]
    assert {layer.kind for layer in layers} == set(DRAWS)
    assert [layer.shapes for layer in layers] == [layer_of(0, i).shapes for i in range(120)]
    assert [layer.shapes for layer in layers] != [layer_of(1, i).shapes for i in range(120)]
    assert all(layer.chosen in layer.functions for layer in [*layers, *fixed_layers()])


def test_the_table_has_a_row_for_each_form_and_names_the_chosen_one():
    *_, sums, products = forms.table_of([layer_norm((64, 8))], 1).splitlines()
    assert sums.startswith("| layer norm | 64x8 | sums |") and sums.endswith("| 1 (1 - 1) | yes |")
    assert products.endswith("|  |")


def test_the_regret_is_the_time_of_the_chosen_form_over_the_best():
    results = {i: (layer(), {"a": seconds, "b": 2.0}) for i, seconds in enumerate([1.0, 2.0, 3.0])}
    results[3] = (layer("b", "softmax"), {"a": 1.0, "b": 7.0})
    lines = forms.report(results).splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines[:5]}
    assert cells["linear"][1:] == ["3", "1.00", "1.45", "1.50"]
    assert cells["softmax"][1:] == ["1", "7.00", "7.00", "7.00"]
    assert cells["all"][1:] == ["4", "1.25", "6.17", "7.00"]
    assert "| softmax | 2x3 | b | 7e+03 | a | 1e+03 | 7.00 |" in lines


def test_forms_that_differ_are_not_compared():
    geometry = ((1, 1), ((1, 1), (1, 1)), (1, 1))
    wrong = Layer(
        "depthwise convolution",
        "",
        [(1, 4, 4, 2), (3, 3, 1, 2)],
        {
            "shifted": lambda x, w: shifted(x, w, *geometry),
            "rows": lambda x, w: banded_rows(x, 1.01 * w, *geometry),
        },
        "shifted",
    )
    with pytest.raises(AssertionError, match="rows is off by"):
        forms.times_of(wrong)
