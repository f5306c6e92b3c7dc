"""Quantize ONNX files with onnxruntime's tools."""

import tempfile
from pathlib import Path

from inference.onnx_graphs import (
    excluded_nodes,
    excluded_weights,
    store_in_8_bits,
    weight_names,
)
from inference.packages import needed, quiet
from utils import RunError, UserError, first_line
from utils.files import atomic_write

CONVOLUTIONS = ["Conv", "ConvTranspose"]
# The ops that are quantized; a normalization or a softmax would lose its small numbers.
PRODUCTS = [*CONVOLUTIONS, "MatMul", "Gemm"]


def quantize_onnx(source, path, precision, samples=None, exclude=(), weights=()):
    """Write the float32 file `source` as float16, dynamic or int8; inputs and outputs stay float32.

    int8 is calibrated with `samples`, a list of {input: array}. Weights whose names match one of
    the regexes in `exclude` stay float32; `weights` are the names of the model's, where known.
    """
    write = {"float16": to_float16, "dynamic": to_dynamic, "int8": to_int8}.get(precision)
    if write is None:
        raise UserError(f"unknown precision {precision!r}; choose from float16, dynamic and int8")
    if precision == "int8" and not samples:
        raise UserError("int8 needs samples of real inputs, which show how large its numbers are")
    needed("onnx", "onnxruntime")
    import onnx

    # The tools write files of their own beside their input.
    with quiet(), tempfile.TemporaryDirectory() as folder:
        try:
            model = onnx.load(source)
            excluded, named = excluded_weights(model, exclude, weights), weight_names(model)
            data = checked(write(Path(source), Path(folder), samples, excluded, named))
        except UserError:
            raise
        except Exception as error:  # the tools have no error class of their own
            raise RunError(
                f"{source}: onnxruntime cannot convert it to {precision}: {first_line(error)}"
            ) from error
    atomic_write(path, data)


def checked(model):
    """The bytes of a model that passes ONNX's full check."""
    import onnx

    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def to_float16(source, folder, samples, exclude, named):
    """Weights and intermediate results in float16; inputs and outputs in float32."""
    import onnx

    from inference import onnx_float16

    model = onnx.load(source)
    onnx_float16.to_float16(model, exclude)
    return model


def to_dynamic(source, folder, samples, exclude, named):
    """Weights in 8 bits; the ranges of the activations are measured at run time.

    The weights are unsigned: on x86 processors without VNNI, ONNX Runtime's products of unsigned
    activations and signed weights overflow 16 bits (off by 0.080 of the output's scale in a small
    model; unsigned 0.022).
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    left = left_in_float(path := prepared(source, folder), exclude)
    quantize_dynamic(
        path,
        folder / "dynamic.onnx",
        op_types_to_quantize=PRODUCTS,
        nodes_to_exclude=names_of(left),
        per_channel=True,
        weight_type=QuantType.QUInt8,
    )
    return with_small_weights(folder / "dynamic.onnx", left, exclude, named)


def to_int8(source, folder, samples, exclude, named):
    """Convolutions and products in int8, as pairs of QuantizeLinear and DequantizeLinear.

    Weights have one scale per channel. The output of a MatMul stays in float, since the
    normalization that follows needs more than 8 bits.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    left = left_in_float(path := prepared(source, folder), exclude)
    quantize_static(
        path,
        folder / "int8.onnx",
        reader(samples),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=PRODUCTS,
        nodes_to_exclude=names_of(left),
        per_channel=True,
        reduce_range=True,  # else products saturate on a CPU without VNNI, and are off by a third
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
    )
    return with_small_weights(folder / "int8.onnx", left, exclude, named)


def prepared(source, folder):
    """The path of a copy with named nodes and inferred shapes, which the tools need."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(source)
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{i}"
    quant_pre_process(
        model, folder / "prepared.onnx", skip_symbolic_shape=True, skip_optimization=True
    )
    return folder / "prepared.onnx"


def left_in_float(path, exclude):
    """The nodes that stay in float: those of excluded weights, and the first convolutions."""
    import onnx

    model = onnx.load(path)
    return [*excluded_nodes(model, exclude), *first_convolutions(model.graph)]


def names_of(nodes):
    """The names of nodes, and those that they have after the tools have split each Gemm."""
    return [name for node in nodes for name in (node.name, f"{node.name}_MatMul")]


def with_small_weights(path, left, exclude, named):
    """The model that a tool has written, with the weights that it left in float32 in 8 bits."""
    import onnx

    model = onnx.load(path)
    store_in_8_bits(model, exclude | {name for node in left for name in node.input}, named)
    return model


def first_convolutions(graph):
    """The convolutions that take the input itself.

    They have few weights and lose much accuracy: on the sample, a stem in int8 makes the largest
    error 0.37 of the logits' scale instead of 0.12, since the normalization that follows magnifies
    the rounding of an empty background.
    """
    raw, found = {value.name for value in graph.input}, []
    for node in graph.node:
        if raw.isdisjoint(node.input):
            continue
        if node.op_type in CONVOLUTIONS:
            found.append(node)
        elif node.op_type not in PRODUCTS:
            raw.update(node.output)
    return found


def reader(samples):
    """The samples as the tools read them: one by one, then None."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        remaining = iter(samples)

        def get_next(self):
            return next(self.remaining, None)

    return Reader()
