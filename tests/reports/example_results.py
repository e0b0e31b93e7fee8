"""A results.json of two methods with three seeds each."""

ITEMS = {"accuracy_before": 400, "accuracy_after": 400, "accuracy_before_add": 200, "accuracy_after_add": 200}
ACCURACY = {"few": (0.70, 0.72, 0.74), "control": (0.40, 0.41, 0.42)}


def example_run(method: str = "few", seed: int = 0, accuracy: float = 0.72, **changes) -> dict:
    metrics = {
        "accuracy_before": 0.4,
        "accuracy_after": accuracy,
        "accuracy_before_add": 0.3,
        "accuracy_after_add": 0.5,
    }
    run = {
        "method": method,
        "seed": seed,
        "trainable_parameters": 1234,
        "samples": 3200,
        "settings": {"items": ITEMS},
        "metrics": {**metrics, "step_seconds": 1.25},
    }
    return {**run, **changes}


def example_results(**changes) -> dict:
    runs = [example_run(m, seed, share) for m, shares in ACCURACY.items() for seed, share in enumerate(shares)]
    results = {
        "experiment": "toy",
        "command": "python scripts/toy.py --all",
        "date": "2026-01-02",
        "versions": {"python": "3.11", "torch": "2.0"},
        "machine": "2 cores, CPU",
        "runs": runs,
    }
    return {**results, **changes}
