"""Argument checks that models share; each message starts with the argument's name."""


def check_image(input_shape):
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input_shape: needs (height, width, channels), got {tuple(input_shape)}")


def check_widths(name, widths):
    if not widths:
        raise ValueError(f"{name}: needs at least one width, got ()")
    if min(widths) < 1:
        raise ValueError(f"{name}: widths must be at least 1, got {tuple(widths)}")


def check_at_least_one(**values):
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")


def check_rate(**rates):
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name}: must be at least 0 and below 1, got {rate}")
