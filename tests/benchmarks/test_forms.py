"""The forms of layers: what the sweep draws, that it continues, and what it reports."""

from benchmarks.form_shapes import DRAWS, fixed_layers, layer_of


def test_a_seed_draws_the_same_layers_of_every_kind():
    layers = [layer_of(0, i) for i in range(120)]
    assert {layer.kind for layer in layers} == set(DRAWS)
    assert [layer.shapes for layer in layers] == [layer_of(0, i).shapes for i in range(120)]
    assert [layer.shapes for layer in layers] != [layer_of(1, i).shapes for i in range(120)]
    assert all(layer.chosen in layer.functions for layer in [*layers, *fixed_layers()])
