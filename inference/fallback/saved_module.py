"""Read a StableHLO module into TensorFlow; it needs no JAX, so that a child process starts fast."""

from inference.to_tflite import save


def save_module(module, inputs, outputs, folder):
    """Write a module as a SavedModel; see `Module`. Inputs and outputs are {name: (shape, dtype)},
    and a free size is None."""
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python.xla import call_module

    data, version, kept_inputs = module

    def call(*tensors):
        results = call_module(
            [tensors[i] for i in kept_inputs],
            version=version,
            module=data,
            Tout=[dtype for _, dtype in outputs.values()],
            Sout=[shape for shape, _ in outputs.values()],
            platforms=["CPU"],
            disabled_checks=["shape_assertions"],
        )
        return dict(zip(outputs, map(tf.identity, results), strict=True))

    specs = [tf.TensorSpec(shape, dtype, name=name) for name, (shape, dtype) in inputs.items()]
    save(tf.function(call, autograph=False).get_concrete_function(*specs), tf.Module(), folder)
