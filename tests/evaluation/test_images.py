"""Image metrics against values computed by hand."""

import math
import sys

import numpy as np
import pytest
import torch

from hf_sparsecoding.evaluation.images import image_metrics, mse, psnr, psnr40_share, ssim


def off_by(*errors: float, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """One image per error: every pixel is too bright by it."""
    target = torch.rand(len(errors), size, size, generator=torch.Generator().manual_seed(0)) * 0.5
    return target + torch.tensor(errors)[:, None, None], target


def test_mse_and_psnr_by_hand():
    target = torch.zeros(2, 2, 2)
    prediction = torch.tensor([[[0.2, 0.0], [0.0, 0.0]], [[0.1, 0.1], [-0.1, 0.1]]])
    assert mse(prediction, target).tolist() == pytest.approx([0.01, 0.01])
    assert psnr(prediction, target).tolist() == pytest.approx([20.0, 20.0])
    assert psnr(*off_by(1.0, 0.1, 0.01)).tolist() == pytest.approx([0.0, 20.0, 40.0], abs=1e-3)


def test_identical_images():
    prediction, target = off_by(0.0, 0.1)
    assert psnr(prediction, target)[0] == math.inf
    metrics = image_metrics(prediction, target)
    assert metrics["psnr"] == pytest.approx((100 + 20) / 2, abs=1e-3)
    assert metrics["psnr40_share"] == 0.5
    assert ssim(target, target).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_psnr40_share():
    assert psnr40_share(*off_by(0.0, 0.0099, 0.0101, 0.5)) == 0.5
    assert psnr40_share(*off_by(0.1)) == 0.0


@pytest.mark.parametrize("size", [6, 8, 12])
def test_ssim_of_even_images(size):
    """Without variance only the luminance is left: (2 a b + c1) / (a^2 + b^2 + c1), c1 = 0.01^2."""
    prediction, target = torch.full((2, size, size), 0.5), torch.full((2, size, size), 0.25)
    expected = (2 * 0.5 * 0.25 + 1e-4) / (0.25 + 0.0625 + 1e-4)
    assert ssim(prediction, target).tolist() == pytest.approx([expected] * 2, abs=1e-4)


def ssim_by_definition(x: np.ndarray, y: np.ndarray) -> float:
    weights = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    weights = np.outer(weights, weights) / weights.sum() ** 2
    x_padded, y_padded = (np.pad(image, 5, mode="reflect") for image in (x, y))
    values = []
    for row, column in np.ndindex(x.shape):
        a, b = (image[row : row + 11, column : column + 11] for image in (x_padded, y_padded))
        mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
        var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
        covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
        luminance = (2 * mean_a * mean_b + 1e-4) / (mean_a**2 + mean_b**2 + 1e-4)
        values.append(luminance * (2 * covariance + 9e-4) / (var_a + var_b + 9e-4))
    return float(np.mean(values))


def test_ssim_is_the_mean_over_gaussian_windows():
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(3, 12, 10, generator=generator, dtype=torch.float64)
    prediction = 0.5 * target + 0.5 * torch.rand(3, 12, 10, generator=generator, dtype=torch.float64)
    expected = [ssim_by_definition(x.numpy(), y.numpy()) for x, y in zip(prediction, target, strict=True)]
    assert ssim(prediction, target).tolist() == pytest.approx(expected, abs=1e-9)


def test_all_metrics():
    prediction, target = off_by(0.1, 0.001)
    prediction.requires_grad_()
    metrics = image_metrics(prediction, target)
    assert list(metrics) == ["mse", "psnr", "psnr40_share", "ssim"]
    assert all(type(value) is float for value in metrics.values())
    assert metrics["mse"] == pytest.approx((0.01 + 1e-6) / 2, rel=1e-3)
    assert metrics["psnr"] == pytest.approx(40, abs=1e-2)
    assert metrics["psnr40_share"] == 0.5
    assert metrics["ssim"] == pytest.approx(ssim(prediction, target).mean().item())


def test_a_blank_prediction_is_told_from_a_right_one():
    target = torch.zeros(1, 12, 12)
    target[:, 4:8, 4:8] = 1
    blank = image_metrics(torch.zeros_like(target), target)
    assert blank["mse"] == pytest.approx(16 / 144)
    assert blank["ssim"] < image_metrics(0.9 * target, target)["ssim"] < image_metrics(target, target)["ssim"]


def test_half_precision_is_computed_in_single():
    prediction, target = off_by(0.1)
    assert mse(prediction.bfloat16(), target.bfloat16()).dtype == torch.float32
    assert image_metrics(prediction.bfloat16(), target)["psnr"] == pytest.approx(20, abs=0.1)


@pytest.mark.parametrize(
    ("prediction", "target", "message"),
    [
        (torch.zeros(2, 4, 4), torch.zeros(1, 4, 4), r"must agree, got \(2, 4, 4\) and \(1, 4, 4\)"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4), r"\[n, height, width\] with n >= 1, got \(2, 1, 4, 4\)"),
        (torch.zeros(0, 4, 4), torch.zeros(0, 4, 4), r"with n >= 1, got \(0, 4, 4\)"),
        (torch.zeros(1, 4, 4), torch.full((1, 4, 4), 255.0), "target must be between 0 and 1, got values from 255 to"),
        (torch.zeros(1, 4, 4), torch.full((1, 4, 4), -0.5), "between 0 and 1, got values from -0.5 to -0.5"),
        (torch.full((1, 4, 4), math.nan), torch.zeros(1, 4, 4), "prediction must be finite, got 16 values"),
        (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4).byte(), "target must be of a floating type, got torch.uint8"),
    ],
)
def test_bad_images_are_rejected(prediction, target, message):
    for metric in (mse, psnr, psnr40_share, ssim, image_metrics):
        with pytest.raises(ValueError, match=message):
            metric(prediction, target)


def test_ssim_refuses_tiny_images_and_names_the_missing_package(monkeypatch):
    with pytest.raises(ValueError, match=r"at least 6 pixels per side, got \(1, 5, 12\)"):
        ssim(torch.zeros(1, 5, 12), torch.zeros(1, 5, 12))
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r"ssim needs torchmetrics: pip install hf-sparsecoding\[plots\]"):
        ssim(torch.zeros(1, 12, 12), torch.zeros(1, 12, 12))
    assert mse(torch.zeros(1, 12, 12), torch.zeros(1, 12, 12)) == 0
