"""Data, pure in (config, seed): every task yields `datasets.Dataset` or `IterableDataset` and knows no model."""
