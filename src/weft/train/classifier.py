"""A convolutional network for small images: digits, MNIST, CIFAR-10."""

from torch import Tensor, nn
from torch.nn import functional as F

# B images in a batch, C channels, H × W pixels, K classes


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from weft import ops

        return ops.relu(x)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        from weft import ops

        return ops.linear(x, self.weight, self.bias)


class Classifier(nn.Module):
    """Convolutions, each but the first halving the image by its stride until at most 4 × 4 are left, then two linear layers.

    Args:
        channels, size: of the images ``[B, channels, size, size]``.
        classes: K.
        operators: ``weft`` takes activations, linear layers and the loss from ``weft.ops``; ``torch`` from PyTorch. The
            convolutions are cuDNN's either way.
    """

    def __init__(self, channels: int, size: int, classes: int, operators: str = "weft") -> None:
        super().__init__()
        relu, linear = (Relu, Linear) if operators == "weft" else (nn.ReLU, nn.Linear)
        self.operators = operators
        width = 32
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), relu()]
        while size > 4:
            layers += [nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.BatchNorm2d(2 * width), relu()]
            width, size = 2 * width, -(-size // 2)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), linear(width * size * size, 128), relu(), linear(128, classes)
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[B, C, H, W]`` and labels ``[B]`` → the sum of the losses and how many were right, both ``[]``."""
        scores = self.layers(x).float()  # [B, K]
        if self.operators == "weft":
            from weft import ops

            loss = ops.cross_entropy(scores, y, reduction="sum")
        else:
            loss = F.cross_entropy(scores, y, reduction="sum")
        return loss, (scores.argmax(1) == y).sum()

    @property
    def blocks(self) -> list[nn.Module]:
        """What is compiled and sharded by itself: the whole."""
        return [self.layers]
