"""MobileNet v3 in PyTorch with torchvision's names of weights, for tests without torchvision. A row
of its tables is (kernel, inner, out, whether it squeezes, activation, stride)."""

from torch import nn

R, H = nn.ReLU, nn.Hardswish
SMALL = [(3, 16, 16, 1, R, 2), (3, 72, 24, 0, R, 2), (3, 88, 24, 0, R, 1), (5, 96, 40, 1, H, 2)]
SMALL += [(5, 240, 40, 1, H, 1)] * 2 + [(5, 120, 48, 1, H, 1), (5, 144, 48, 1, H, 1)]
SMALL += [(5, 288, 96, 1, H, 2)] + [(5, 576, 96, 1, H, 1)] * 2
LARGE = [(3, 16, 16, 0, R, 1), (3, 64, 24, 0, R, 2), (3, 72, 24, 0, R, 1), (5, 72, 40, 1, R, 2)]
LARGE += [(5, 120, 40, 1, R, 1)] * 2 + [(3, 240, 80, 0, H, 2), (3, 200, 80, 0, H, 1)]
LARGE += [(3, 184, 80, 0, H, 1)] * 2 + [(3, 480, 112, 1, H, 1), (3, 672, 112, 1, H, 1)]
LARGE += [(5, 672, 160, 1, H, 2)] + [(5, 960, 160, 1, H, 1)] * 2


class MobileNet(nn.Module):
    def __init__(self, size, classes):
        super().__init__()
        rows, hidden = (SMALL, 1024) if size == "small" else (LARGE, 1280)
        layers, before = [unit(3, 16, 3, H(), stride=2)], 16
        for row in rows:
            layers.append(Residual(before, *row))
            before = row[2]
        self.features = nn.Sequential(*layers, unit(before, 6 * before, 1, H()))
        self.classifier = nn.Sequential(
            nn.Linear(6 * before, hidden), H(), nn.Dropout(), nn.Linear(hidden, classes)
        )

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def unit(before, after, kernel, *act, stride=1, groups=1):
    sizes = {"stride": stride, "padding": kernel // 2, "groups": groups, "bias": False}
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, **sizes), nn.BatchNorm2d(after, 1e-3), *act
    )


class Residual(nn.Module):
    def __init__(self, before, kernel, inner, after, squeezes, act, stride):
        super().__init__()
        layers = [unit(before, inner, 1, act())] if inner != before else []
        layers.append(unit(inner, inner, kernel, act(), stride=stride, groups=inner))
        layers += [Squeeze(inner)] if squeezes else []
        self.block = nn.Sequential(*layers, unit(inner, after, 1))
        self.adds = stride == 1 and before == after

    def forward(self, x):
        return x + self.block(x) if self.adds else self.block(x)


class Squeeze(nn.Module):
    def __init__(self, channels):
        super().__init__()
        few = max(8, (channels // 4 + 4) // 8 * 8)
        few += 8 if few < 0.9 * (channels // 4) else 0
        self.fc1, self.fc2 = nn.Conv2d(channels, few, 1), nn.Conv2d(few, channels, 1)

    def forward(self, x):
        weight = self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu())
        return x * nn.functional.hardsigmoid(weight)
