"""Operations that a GPU runs as one kernel. `x.py` has an operation's contract and its reference, plain torch in fp32;
`x_triton.py` has the kernels that stand in for it on a GPU."""
