"""GPU kernels. Nothing here is imported until a tensor asks for them; `attention_triton` and `transfer_triton` do."""
