"""Sets of contenders that take turns on one machine; how to time them is in `turns`."""
