"""How close drawn images are to the true ones. Ink and errors are on the scale 0 to 1 (a data range of 1).

n images, H pixels high, W pixels wide.
"""

import importlib.util

import torch
from jaxtyping import Float
from torch import Tensor


PSNR_CAP = 100.0  # dB; what an image counts at most in a mean, so that a perfect one (inf) does not swallow the others
WINDOW = 11  # pixels; the Gaussian window of SSIM, standard deviation 1.5: Wang et al. 2004, as most papers report it


def mse(prediction: Float[Tensor, "n H W"], target: Float[Tensor, "n H W"]) -> Float[Tensor, " n"]:
    """Mean squared error per image."""
    prediction, target = checked(prediction, target)
    return (prediction - target).square().mean(dim=(1, 2))


def psnr(prediction: Float[Tensor, "n H W"], target: Float[Tensor, "n H W"]) -> Float[Tensor, " n"]:
    """Peak signal-to-noise ratio per image, -10 log10(mse), in dB. Identical images give inf."""
    return -10 * mse(prediction, target).log10()


def psnr40_share(prediction: Float[Tensor, "n H W"], target: Float[Tensor, "n H W"]) -> float:
    """Share of images with a PSNR above 40 dB, that is with a root mean squared error below 0.01."""
    return (psnr(prediction, target) > 40).float().mean().item()


def ssim(prediction: Float[Tensor, "n H W"], target: Float[Tensor, "n H W"]) -> Float[Tensor, " n"]:
    """Structural similarity per image, 1 for identical ones. Source: Wang et al. 2004, by torchmetrics.

    A Gaussian window of 11 x 11 pixels with standard deviation 1.5 slides over every pixel; the image is reflected at
    its borders, so sides from 6 pixels on will do.
    """
    require_torchmetrics()
    from torchmetrics.functional.image import structural_similarity_index_measure

    prediction, target = checked(prediction, target)
    if min(target.shape[1:]) <= WINDOW // 2:
        raise ValueError(f"ssim needs images of at least {WINDOW // 2 + 1} pixels per side, got {tuple(target.shape)}")
    return structural_similarity_index_measure(
        prediction[:, None], target[:, None], kernel_size=WINDOW, sigma=1.5, data_range=1.0, reduction="none"
    )


def check_measurable(side: int) -> None:
    """Whether `image_metrics` can measure pictures of `side` pixels a side, asked before long work that ends with it.

    Raises:
        ImportError: torchmetrics is missing.
        ValueError: the pictures are too small.
    """
    require_torchmetrics()
    if side <= WINDOW // 2:
        raise ValueError(f"ssim needs images of at least {WINDOW // 2 + 1} pixels per side, got {side}")


def require_torchmetrics() -> None:
    if importlib.util.find_spec("torchmetrics") is None:
        raise ImportError("ssim needs torchmetrics: pip install hf-sparsecoding[plots]")


@torch.no_grad()
def image_metrics(prediction: Float[Tensor, "n H W"], target: Float[Tensor, "n H W"]) -> dict[str, float]:
    """Means over all images: mse, psnr (each image counts at most `PSNR_CAP` = 100 dB), psnr40_share and ssim."""
    return {
        "mse": mse(prediction, target).mean().item(),
        "psnr": psnr(prediction, target).clamp(max=PSNR_CAP).mean().item(),
        "psnr40_share": psnr40_share(prediction, target),
        "ssim": ssim(prediction, target).mean().item(),
    }


def checked(prediction: Tensor, target: Tensor) -> tuple[Float[Tensor, "n H W"], Float[Tensor, "n H W"]]:
    """Both as float32 at least. A prediction may leave [0, 1]: it is not clamped, the excess counts as error."""
    if prediction.shape != target.shape:
        raise ValueError(f"prediction and target must agree, got {tuple(prediction.shape)} and {tuple(target.shape)}")
    if target.ndim != 3 or 0 in target.shape:
        raise ValueError(f"images must be [n, height, width] with n >= 1, got {tuple(target.shape)}")
    for name, images in (("prediction", prediction), ("target", target)):
        if not images.is_floating_point():
            raise ValueError(f"{name} must be of a floating type, got {images.dtype}; divide grey values by 255")
        if wrong := int((~images.isfinite()).sum()):
            raise ValueError(f"{name} must be finite, got {wrong} values that are not")
    low, high = target.min().item(), target.max().item()
    if low < 0 or high > 1:
        raise ValueError(f"target must be between 0 and 1, got values from {low:g} to {high:g}")
    dtype = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
    return prediction.to(dtype), target.to(dtype)
